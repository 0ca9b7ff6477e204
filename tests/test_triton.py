"""The Triton kernels against the torch ones, which are the definition: on CPU tensors, by Triton's
interpreter; compiled for a GPU that need not be there; and what is launched, without a launch."""
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kernels
from kernels import TorchKernels, TritonKernels, turned

if __name__ != "__main__":                        # what compiles runs this file, see the end
    os.environ["TRITON_INTERPRET"] = "1"          # read when triton is first imported, so not later
    assert "triton" not in sys.modules, "a test module imported triton before this one"
    pytest.importorskip("triton", reason="Triton is not installed (there is none for macOS)")
    from triton.language import bfloat16, float32
    from triton.runtime import interpreter

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def bfloat16_products(monkeypatch):
    """The interpreter keeps bfloat16 as bit patterns and multiplies those in tl.dot (Triton's issue
    11584): its operands are made float32 before."""
    dot, convert = interpreter.InterpreterBuilder.create_dot, interpreter._convert_float

    def create_dot(self, *args):
        wide = (interpreter.TensorHandle(convert(x.data, bfloat16, float32, None).view("float32"),
                                         float32) if x.dtype.scalar == bfloat16 else x
                for x in args[:2])
        return dot(self, *wide, *args[2:])
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


def scene(work, heads, kv_heads, head_dim, block_size, dtype, padding=2, seed=0, longest=0):
    """The arguments of paged_attention but scale: requests of (context, queries), then padding.

    Pages are drawn with replacement: out of order, shared, repeated. NaN in every slot that no
    request has filled and in the queries of the padding; tables end in numbers of no page, and have
    room for `longest` tokens.
    """
    draw = torch.Generator().manual_seed(seed)
    most = max(context for context, _ in work) // block_size + 3
    pool, width = most + 4, max(most, -(-longest // block_size))
    filled = torch.zeros(pool, block_size, dtype=torch.bool)
    tables = torch.full((len(work), width), 10 ** 9, dtype=torch.int32)
    for table, (context, _) in zip(tables, work):
        pages = torch.randint(pool, (-(-context // block_size),), generator=draw)
        table[:len(pages)] = pages
        places = torch.arange(context)
        filled[pages[places // block_size], places % block_size] = True
    kv = torch.randn(2, pool, kv_heads, block_size, head_dim, generator=draw).to(dtype)
    turned(kv[0]).masked_fill_(~filled[:, None, None, :], torch.nan)
    kv[1].masked_fill_(~filled[:, None, :, None], torch.nan)
    starts = torch.tensor([0] + [n for _, n in work]).cumsum(0).int()
    qkv = torch.randn(int(starts[-1]) + padding, heads + 2 * kv_heads, head_dim, generator=draw)
    qkv[starts[-1]:] = torch.nan
    q = qkv.to(dtype).split([heads, 2 * kv_heads], 1)[0]          # a view, as `attention` has it
    return q, kv, tables, starts, torch.tensor([context for context, _ in work]).int()


def check(work, heads, kv_heads, head_dim, block_size, dtype, splits=1, **more):
    """`splits` of them: on a GPU of very many processors, with room for a context long enough."""
    arguments = scene(work, heads, kv_heads, head_dim, block_size, dtype,
                      longest=128 * splits, **more)
    ops = TritonKernels(processors=10 ** 6)
    ops.MAX_SPLITS = splits
    got = ops.paged_attention(*arguments, head_dim ** -0.5)
    want = TorchKernels.paged_attention(*arguments, head_dim ** -0.5)
    assert got.dtype == want.dtype and got.shape == want.shape and got.is_contiguous()
    # float32: sums in another order. Else weights are rounded before they meet the values.
    near = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(got, want, rtol=near, atol=near)
    assert not got[arguments[3][-1]:].count_nonzero()             # the padding


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim, splits", [
    (32, 1), (64, 1), (80, 1), (96, 1), (128, 1), (256, 1), (32, 4), (80, 2), (256, 8)])
def test_mixed_steps(head_dim, splits, dtype):
    """Decodes, drafts, chunks, whole prompts and requests without queries in one step."""
    work = [(37, 1), (0, 0), (70, 9), (16, 16), (33, 0), (90, 4)]
    check(work, 4, 2, head_dim, 16, dtype, splits)


@pytest.mark.parametrize("block_size", [1, 16, 17])
@pytest.mark.parametrize("heads, kv_heads", [(1, 1), (3, 3), (4, 1), (8, 1), (7, 1), (40, 2)])
def test_groups_and_pages(heads, kv_heads, block_size):
    """Groups of 1, 4, 8, 7 and 20 query heads; pages of one token, and of an odd number."""
    check([(19, 3), (40, 1), (17, 17), (9, 0)], heads, kv_heads, 32, block_size, torch.float16)
    check([(70, 3), (40, 1)], heads, kv_heads, 32, block_size, torch.float32, splits=2)


@pytest.mark.parametrize("splits", [1, 4, 64])
def test_long_contexts(splits):
    """Up to 5,000 tokens, which are 79 tiles; the shorter requests' splits are mostly empty."""
    check([(5000, 1), (3, 1)], 2, 1, 32, 16, torch.float32, splits)
    check([(4097, 2), (130, 3)], 4, 1, 32, 16, torch.float16, splits)


def test_chunks():
    """Chunks of many tiles of 64 rows, over a context that they only end."""
    check([(150, 150), (333, 70), (65, 64)], 4, 1, 64, 16, torch.float16)
    check([(150, 150), (333, 70), (65, 64)], 4, 1, 64, 16, torch.bfloat16, splits=2)


def test_random_steps():
    draw = torch.Generator().manual_seed(3)
    number = lambda low, high: int(torch.randint(low, high + 1, (), generator=draw))
    for seed in range(15):
        contexts = [number(1, 80) for _ in range(number(1, 5))]
        work = [(context, number(0, min(context, 30))) for context in contexts]
        kv_heads = number(1, 2)
        check(work, kv_heads * number(1, 5), kv_heads, 2 * number(1, 40), number(1, 20),
              DTYPES[seed % 3], 1 << number(0, 2), padding=number(0, 20), seed=seed)


def test_more_requests_than_one_look_takes():
    """A tile finds its request among 128 at a time: 150, some without queries."""
    check([(r % 5 + 1, r % 3 % 2) for r in range(150)], 1, 1, 16, 4, torch.float32)


def test_a_step_of_padding_alone():
    """No query at all, whatever the requests' contexts: zeros."""
    check([(8, 0), (0, 0)], 4, 2, 32, 16, torch.float16, padding=9)
    check([(300, 0)], 4, 2, 32, 16, torch.float16, splits=4, padding=9)


@pytest.mark.parametrize("block_size", [1, 16, 17])
@pytest.mark.parametrize("dtype", DTYPES)
def test_write_kv(dtype, block_size):
    """Slots in any order, some of them -1; every other slot is still NaN."""
    draw = torch.Generator().manual_seed(0)
    slots = torch.randperm(6 * block_size, generator=draw)[:4 * block_size][:20]
    slots[1::3] = -1
    qkv = torch.randn(len(slots), 11, 80, generator=draw).to(dtype)
    k, v = qkv.split([5, 3, 3], 1)[1:]
    got, want = torch.full((2, 2, 6, 3, block_size, 80), torch.nan, dtype=dtype)
    TritonKernels(1).write_kv(got, k, v, slots)
    TorchKernels.write_kv(want, k, v, slots)
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    assert 0 < got.isnan().float().mean() < 1


def test_the_whole_of_attention():
    """Rotation, writing and reading of a prompt by the base class's `attention`."""
    draw, tokens, heads, k = torch.Generator().manual_seed(0), 21, 4, 2
    qkv = torch.randn(tokens + 1, heads + 2 * k, 32, generator=draw)
    cos, sin = torch.randn(2, tokens + 1, 1, 32, generator=draw)
    slots = torch.cat([torch.arange(32, 32 + tokens), torch.tensor([-1])])
    batch = (torch.tensor([[2, 3]]).int(), torch.tensor([0, tokens]).int(),
             torch.tensor([tokens]).int(), 0.2)
    got, want = (ops.attention(qkv, cos, sin, torch.zeros(2, 5, k, 16, 32), slots, *batch)
                 for ops in (TritonKernels(1), TorchKernels()))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def launches(monkeypatch, tokens, requests, pages, heads, kv_heads, head_dim, dtype):
    """[(kernel's number, grid, arguments)] of a layer, from tensors that have shapes alone: to read
    one on the host, and so to wait for a GPU, would raise."""
    made = []

    class Recorder:
        def __init__(self, number):
            self.number = number

        def __getitem__(self, grid):
            return lambda *arguments: made.append((self.number, grid, arguments))
    monkeypatch.setattr(kernels, "triton_kernels", lambda: map(Recorder, range(3)))
    empty = lambda *shape, dtype=dtype: torch.empty(shape, dtype=dtype, device="meta")
    ops, kv = TritonKernels(132), empty(2, 50, kv_heads, 16, head_dim)
    numbers = [empty(*shape, dtype=torch.int32) for shape in ((requests, pages), (requests + 1,),
                                                              (requests,))]
    ops.write_kv(kv, *empty(2, tokens, kv_heads, head_dim), empty(tokens, dtype=torch.int64))
    ops.paged_attention(empty(tokens, heads, head_dim), kv, *numbers, 0.1)
    return made


@pytest.mark.parametrize("step, grids", [
    ((1, 1, 256), [(1,), (2, 1, 32), (8,)]),              # one decode, 4,096 tokens: 32 splits
    ((1, 1, 4000), [(1,), (2, 1, 64), (8,)]),             # no more than 64
    ((1, 1, 4), [(1,), (2, 1, 1)]),                       # a short context is not worth splitting
    ((256, 256, 256), [(256,), (385, 1, 1)]),             # nor one of many
    ((20, 20, 256), [(20,), (31, 1, 8), (160,)]),
    ((2048, 1, 256), [(2048,), (258, 1, 1)])])            # a chunk: 8 queries a tile
def test_launches_depend_on_shapes_alone(monkeypatch, step, grids):
    """Nothing is read on the host, and a grid is what (T, R, pages) make it: graphs can replay."""
    made = launches(monkeypatch, *step, 8, 1, 128, torch.bfloat16)
    assert [number for number, _, _ in made] == list(range(len(grids)))
    assert [grid for _, grid, _ in made] == grids


def compile_for(capability):
    """Compile a layer's kernels ahead, as they would be launched; prints what each takes."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    functions = kernels.triton_kernels()
    short = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16",
             torch.int32: "i32", torch.int64: "i64"}
    for dtype, head_dim, tokens in ((torch.bfloat16, 128, 1), (torch.bfloat16, 128, 99),
                                    (torch.bfloat16, 80, 99), (torch.float16, 256, 99),
                                    (torch.float32, 128, 99)):
        with pytest.MonkeyPatch.context() as patch:
            made = launches(patch, tokens, 1, 256, 8, 1, head_dim, dtype)
        for number, _, arguments in made:
            function, signature, constants, attributes = functions[number], {}, {}, {}
            for i, (parameter, value) in enumerate(zip(function.params, arguments)):
                tensor = isinstance(value, torch.Tensor)
                signature[parameter.name] = (
                    "constexpr" if parameter.is_constexpr else "*" + short[value.dtype] if tensor
                    else "fp32" if isinstance(value, float) else "i32")
                if parameter.is_constexpr:
                    constants[parameter.name] = value
                elif tensor or value % 16 == 0 and not parameter.do_not_specialize:
                    attributes[i,] = [["tt.divisibility", 16]]
            built = triton.compile(ASTSource(function, signature, constants, attributes),
                                   target=GPUTarget("cuda", capability, 32))
            print(json.dumps({
                "kernel": function.__name__, "head_dim": head_dim, "dtype": str(dtype),
                "tokens": tokens, "shared": built.metadata.shared, "cubin": len(built.asm["cubin"]),
                "halves": built.asm["ptx"].count("ld.global.b16"),
                "at once": built.asm["ptx"].count("cp.async.cg")}))


def test_they_compile_for_a_gpu(tmp_path):
    """For Hopper, by ptxas, in a process of its own, as the interpreter replaces the compiler in
    this one. A tile of keys is loaded 16 bytes at a time, although pages lie anywhere, and two
    programs find room in a processor."""
    import triton
    if not (Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas").exists():
        pytest.skip("this build of Triton has no ptxas")
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0",
                                "PYTHONPATH": str(Path(kernels.__file__).parent)}
    done = subprocess.run([sys.executable, __file__, "90"], env=environment, text=True,
                          capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    built = [json.loads(line) for line in done.stdout.splitlines()]
    print(*built, sep="\n")
    assert {one["kernel"] for one in built} == {"write_kv", "attend", "merge"}
    for one in built:
        assert one["cubin"] and one["shared"] <= 227 * 1024 // 2
        if one["kernel"] == "attend":
            assert one["at once"] >= 16 and not one["halves"]


if __name__ == "__main__":
    compile_for(int(sys.argv[1]))
