"""The guided tour, `python shift.py`: what it says is what the layout and the formula say.

    pytest tests/test_tour.py
"""
import re
import subprocess
import sys

import pytest

from common import factorizations
from server import ROOT
from shift import Layout

sys.path.insert(0, str(ROOT / "assets"))
import tour

LAYOUTS = [(4, 2, 16, 4, 100), (8, 1, 8, 1, 5), (1, 8, 64, 64, 1), (2, 3, 12, 6, 7),
           (1, 1, 4, 2, 9)]          # sp, tp, H, K, T


# --------------------------------------------------------------------------------------------------
# Bytes: the formula of the design, written again


def elements(sp, tp, H, K, Dh, D, T, s):
    """What rank (s, any t) sends in one layer: qkv, attention and the two all_reduces."""
    P = sp * tp
    h, k = H // P, max(1, K // P)
    mine = (T * (s + 1)) // sp - (T * s) // sp
    return [(sp - 1) * mine * (h + 2 * k) * Dh, (T - mine) * h * Dh, 4 * (tp - 1) / tp * mine * D]


def test_the_worked_numbers():
    """Llama-70B-like, P = 8: TP 3.50, (2,4) 1.64, (4,2) 0.71, SP 0.246 elements per T*D."""
    T, H, K, Dh = 800, 64, 8, 128
    for sp, tp, say in ((1, 8, "3.50"), (2, 4, "1.64"), (4, 2, "0.71"), (8, 1, "0.246")):
        mean = sum(sum(elements(sp, tp, H, K, Dh, H * Dh, T, s)) for s in range(sp)) / sp
        for value in (mean, tour.formula(Layout(sp, tp, H, K, H), T, H * Dh, Dh)):
            assert f"{value / (T * H * Dh):.{len(say) - 2}f}" == say


@pytest.mark.parametrize("H, K, Dh, D", [(64, 8, 128, 8192), (16, 16, 12, 100), (8, 2, 12, 40)])
def test_elements_sent_and_the_closed_form(H, K, Dh, D):
    """elements_sent is the formula rank by rank, and its average over ranks the closed form."""
    for sp, tp in factorizations(8):
        layout = Layout(sp, tp, H, K, H)
        for T in (1, 5, 13, 64):
            for m_sp, m_tp, way in ((sp, tp, layout), (1, 8, layout.shift)):
                total = 0
                for rank in range(8):
                    sent = tour.elements_sent(way, rank, T, D, Dh)
                    qkv, attention, reduce = elements(m_sp, m_tp, H, K, Dh, D, T, rank // m_tp)
                    assert list(sent.values()) == pytest.approx(
                        [qkv, attention, reduce / 2, reduce / 2])
                    total += sum(sent.values())
                assert total / 8 == pytest.approx(tour.formula(way, T, D, Dh))


# --------------------------------------------------------------------------------------------------
# Tables and arguments: no ranks needed


def span(first, last):
    return str(first) if first == last else f"{first}-{last}"


@pytest.mark.parametrize("sp, tp, H, K, T", LAYOUTS)
def test_ownership(sp, tp, H, K, T):
    """The table says, rank by rank, what the layout says."""
    P, want = sp * tp, []
    out = tour.ownership(Layout(sp, tp, H, K, H), T)
    table = [line.replace("|", " ").split() for line in out.splitlines()
             if line[:4].strip().isdigit()]
    for s in range(sp):
        for t in range(tp):
            block, first, last = t * sp + s, T * s // sp, T * (s + 1) // sp - 1
            head = block * (H // P) // (H // K)
            want.append([str(s * tp + t), str(s), str(t), str(block),
                         span(block * (H // P), (block + 1) * (H // P) - 1),
                         span(head, head + max(1, K // P) - 1),
                         "none" if last < first else span(first, last),
                         span(t * sp, t * sp + sp - 1), span(0, T - 1), str(block)])
    assert table == want


@pytest.mark.parametrize("sp, tp, H, K, T", LAYOUTS)
def test_sums(sp, tp, H, K, T):
    """The bytes of both modes, collective by collective, are those of the formula."""
    P, D, Dh = sp * tp, 40, 6
    out = tour.sums(Layout(sp, tp, H, K, H), T, D, Dh)
    said = {line[:24].strip(): [float(x.replace(",", "")) for x in line[24:].split()]
            for line in out.splitlines()[1:]}
    for column, (m_sp, m_tp) in enumerate(((sp, tp), (1, P))):
        sent = [elements(m_sp, m_tp, H, K, Dh, D, T, s) for s in range(m_sp)]
        mean = [sum(row) / m_sp for row in zip(*sent)]
        assert said["qkv all_to_all"][column] == pytest.approx(mean[0], abs=0.06)
        assert said["attention all_to_all"][column] == pytest.approx(mean[1], abs=0.06)
        assert said["o all_reduce"][column] == pytest.approx(mean[2] / 2, abs=0.06)
        assert said["mlp all_reduce"][column] == pytest.approx(mean[2] / 2, abs=0.06)
        assert said["sum"][column] == pytest.approx(sum(mean), abs=0.06)
        assert said["closed form"][column] == pytest.approx(sum(mean), abs=0.06)
        assert said["sum / (T * D)"][column] == pytest.approx(sum(mean) / T / D, abs=0.0006)


@pytest.mark.parametrize("given, sp, tp", [
    ((), 4, 2), (("--sp", 8), 8, 1), (("--tp", 4), 2, 4), (("--ranks", 4, "--sp", 2), 2, 2),
    (("--ranks", 1), 1, 1), (("--ranks", 3, "--heads", 6, "--kv-heads", 3), 3, 1)])
def test_what_is_not_given_is_filled_in(given, sp, tp):
    """Any rank count works without --sp and --tp, and either of them is enough."""
    layout, *_ = tour.arguments(list(map(str, given)))
    assert (layout.sp, layout.tp) == (sp, tp)


@pytest.mark.parametrize("given, says", [
    (("--sp", 3, "--tp", 2), "sp 3 x tp 2 is not 8 ranks"), (("--sp", 3), "8 ranks"),
    (("--heads", 12), "12 heads"), (("--kv-heads", 3), "3 KV heads"), (("--tokens", 0), "--tokens"),
    (("--ranks", 0), "at least 1"), (("--tp", -1), "at least 1"), (("--heads", 0), "at least 1"),
    (("--tp", 0), "at least 1"), (("--sp", 0), "at least 1"), (("--dim", 0), "at least 1"),
    (("--head-dim", 0), "--head-dim"), (("--ranks", "two"), "--ranks: invalid int value: 'two'"),
    (("--rank", 4), "--rank 4"), (("--tokens",), "--tokens")])
def test_what_cannot_be_is_one_line(capsys, given, says):
    """Impossible values: code 2, one line on stderr that carries the value, nothing else."""
    code = tour.main(list(map(str, given)))
    out, err = capsys.readouterr()
    assert code == 2 and not out
    assert err.startswith("shift.py: ")
    assert says in err and err.count("\n") == 1 and err.endswith("\n")


# --------------------------------------------------------------------------------------------------
# The whole tour, on ranks of its own


def command(*arguments):
    return subprocess.run([sys.executable, ROOT / "shift.py", *map(str, arguments)], text=True,
                          capture_output=True, timeout=100)


def kilobytes(text):
    number, unit = text.replace(",", "").split()
    return float(number) * {"KB": 1, "MB": 1024}[unit]


@pytest.mark.parametrize("sp, tp, H, K, T", [(4, 2, 16, 4, 100), (2, 1, 4, 1, 1),
                                             (1, 2, 2, 2, 5)])
def test_tour(sp, tp, H, K, T):
    """Real ranks: the walk's shapes and bytes are those of the design, and the modes agree."""
    P, Dh = sp * tp, 8
    D, h = H * Dh, H // P
    C = (h + 2 * max(1, K // P)) * Dh
    done = command("--ranks", P, "--sp", sp, "--tp", tp, "--heads", H, "--kv-heads", K,
                   "--head-dim", Dh, "--tokens", T)
    out = done.stdout
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert out.startswith(f"{P} ranks = sp {sp} x tp {tp};  {H} query heads, {K} KV heads;")
    assert max(map(len, out.splitlines())) <= 100 and "\033" not in out
    chapters = [int(number) for number in re.findall(r"^(\d)\. .*---$", out, re.M)]
    assert chapters == [1, 2, 3, 4, 5, 6]
    assert "for shift mode: 0 bytes (all ranks together: 0)" in out
    assert f"Bit for bit the same on {P} of {P} ranks" in out
    assert f"4 times these, for {2 * P} of {2 * P} ranks and modes" in out
    assert float(re.search(r"differ by at most (\S+) ", out)[1]) < 1e-5

    rank = int(re.search(r"seen from rank (\d+)", out)[1])
    for name, m_sp, m_tp in (("base", sp, tp), ("shift", 1, P)):
        walk = out.split(f"\n{name} mode: ")[1].split("\n\n")[0]
        s = rank // m_tp
        t = T * (s + 1) // m_sp - T * s // m_sp
        assert walk.startswith(f"sp {m_sp} x tp {m_tp}; ")
        shapes = re.findall(r"(\(\d[^)]*\))", walk)
        last, both = f"({t}, {D})", f"({m_sp}, {t}, {h * Dh})"
        want = [last, f"({m_sp}, {t}, {C})", f"({T}, {C})", f"({T}, {h * Dh})", both,
                f"({t}, {m_sp * h * Dh})", last, last]
        skipped = ({2, 4, 5} if m_sp == 1 else set()) | ({7} if m_tp == 1 else set())
        assert shapes == [shape for i, shape in enumerate(want) if i not in skipped]
        sent = tour.elements_sent(Layout(m_sp, m_tp, H, K, H), rank, T, D, Dh).values()
        busy = [n for n, there in zip(sent, (m_sp > 1, m_sp > 1, m_tp > 1)) if there]
        said = [kilobytes(text) for text in re.findall(r"(\S+ [KM]B) sent", walk)]
        assert said == pytest.approx([4 * n / 1024 for n in busy], abs=0.051)


def test_as_a_command():
    """python shift.py --heads 12 for real: the code reaches the shell, no traceback the user."""
    bad = command("--heads", 12)
    assert bad.returncode == 2 and not bad.stdout
    assert bad.stderr.startswith("shift.py: ") and bad.stderr.count("\n") == 1
