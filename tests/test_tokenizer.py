"""The tokenizer against Hugging Face's, on random text; its decoder; and chat templates."""
import json
import random
import unicodedata
from pathlib import Path

import pytest
import torch
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as HFTokenizer
from tokenizers.trainers import BpeTrainer, UnigramTrainer, WordPieceTrainer
from transformers import AutoTokenizer

from common import NoLink, oracle_logits, requests, step
from kernels import TorchKernels
from assets.tokenizer import RawTokens, Tokenizer
from model import Checkpoint, Config, Llama
from shift import Layout, UserError, both_modes

LLAMA3_SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
                r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN_SPLIT = LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
LLAMA3_TEMPLATE = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" + system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if message['role'] not in ['user', 'assistant', 'tool'] %}
        {{- raise_exception("role " + message['role'] + " is unknown") }}
    {%- endif %}
    {%- if loop.index0 > 5 %}{% break %}{% endif %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {%- if message['role'] == 'tool' %}
        {{- message['content'] | tojson }}
    {%- else %}
        {{- message['content'] | trim }}
    {%- endif %}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
SPECIAL = {"gpt2": ["<|endoftext|>"],
           "llama3": ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>",
                      "<|end_header_id|>", "<|eot_id|>"],
           "qwen": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
           "smollm": ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>"]}
PIECES = """a I the cat naïve Straße don't I'LL we've they're x'S 's ' '' 12 1 345 1234567 3.14
١٢٣ Ⅷ ½ x² 漢字 かな カ 한글 emoji 🙂 👩‍👩‍👧 🇫🇷 ️ é e\u0301 A\u030a ͏́ \u0301 ﬁ Å ... !? -- _ __init__
#include </p> "q" $5 %
foo_bar camelCase UPPER ß İ ı ǆ ạ̈ \u200b \ufeff \u00ad نص עברית हिन्दी ไทย 𝒳 \U0001f9ff""".split()
SPACES = [" ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", " \n ", "\u00a0", "\u3000", "\u2028",
          "\x0b", "\x85", "", "", ""]


ASSIGNED = [chr(i) for i in range(0x3400) if unicodedata.category(chr(i)) not in ("Cn", "Cs")]


def word(draw):
    syllables = "ka ri to men su ing er th on at e n".split()
    return "".join(draw.choices(syllables, k=draw.randint(1, 3)))


def random_text(draw, special=()):
    """Words, odd pieces, runs of spaces, special tokens; with and without space between them."""
    pieces = PIECES + list(special) * 3
    return "".join(draw.choice((word(draw), draw.choice(pieces))) + draw.choice(SPACES)
                   for _ in range(draw.randint(0, 9)))


def random_characters(draw):
    """Any characters that Unicode has assigned, side by side."""
    return "".join(draw.choices(ASSIGNED, k=draw.randint(1, 12)))


def corpus(draw):
    for _ in range(400):
        words = " ".join(word(draw) for _ in range(8))
        yield words + draw.choice(SPACES) + " ".join(draw.choices(PIECES, k=4)) + "\n"


def build(kind):
    """A small tokenizer of the kind, trained: every part as the model family's own file has it."""
    tokenizer, special, draw = HFTokenizer(models.BPE()), SPECIAL[kind], random.Random(kind)
    byte_level = lambda regex: pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=regex)
    split = lambda pattern: pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(pattern), "isolated"), byte_level(False)])
    tokenizer.pre_tokenizer = {
        "gpt2": byte_level(True), "llama3": split(LLAMA3_SPLIT), "qwen": split(QWEN_SPLIT),
        "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(True), byte_level(True)])}[kind]
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    if kind == "qwen":
        tokenizer.normalizer = normalizers.NFC()
    first = special if kind == "smollm" else []               # the first ids, or after all others
    alphabet = [] if kind == "smollm" else pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(corpus(draw), BpeTrainer(
        vocab_size=900, initial_alphabet=alphabet, special_tokens=first, show_progress=False))
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    if kind == "qwen":
        tokenizer.add_tokens([AddedToken("<tool_call>", special=False, normalized=False)])
    if kind == "llama3":
        bos = special[0]
        tokenizer.post_processor = processors.Sequence([
            processors.ByteLevel(trim_offsets=False), processors.TemplateProcessing(
                single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1",
                special_tokens=[(bos, tokenizer.token_to_id(bos))])])
    return tokenizer


def write(directory, tokenizer, change=None, **config):
    """tokenizer.json, changed by hand where a test wants it, and tokenizer_config.json."""
    tokenizer.save(str(directory / "tokenizer.json"))
    if change:
        spec = json.loads((directory / "tokenizer.json").read_text())
        change(spec)
        (directory / "tokenizer.json").write_text(json.dumps(spec))
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module", params=SPECIAL)
def pair(request, tmp_path_factory):
    """(kind, ours, transformers') of one family, from the same files."""
    kind = request.param
    directory, tokenizer = tmp_path_factory.mktemp(kind), build(kind)
    spec = json.loads(tokenizer.to_str())
    if kind == "smollm":
        assert spec["added_tokens"][0]["id"] == 0 and len(spec["model"]["vocab"]) > 300
        assert sum(len(token) == 1 for token in spec["model"]["vocab"]) < 200, "not all bytes"
    elif kind != "qwen":
        assert spec["added_tokens"][-1]["id"] == tokenizer.get_vocab_size() - 1
    ignore = lambda spec: spec["model"].update(ignore_merges=kind == "llama3")
    write(directory, tokenizer, ignore, bos_token=SPECIAL[kind][0], eos_token=SPECIAL[kind][-1])
    ours = Tokenizer(str(directory), Config(eos=(5,)))
    return kind, ours, AutoTokenizer.from_pretrained(directory)


def differences(ours, theirs, texts):
    both = ((text, ours.encode(text, bos=False), theirs.encode(text, add_special_tokens=False))
            for text in texts)
    return [(text, got, want) for text, got, want in both if got != want]


def test_ids_equal_transformers(pair):
    """2,000 random texts, special tokens among them: the very same ids."""
    kind, ours, theirs = pair
    draw = random.Random(1)
    texts = [random_text(draw, SPECIAL[kind] + ["<tool_call>"]) for _ in range(2000)]
    wrong = differences(ours, theirs, texts)
    assert not wrong, f"{len(wrong)} differ; the shortest: {min(wrong, key=lambda x: len(x[0]))}"
    used = {i for text in texts for i in ours.encode(text)}
    assert len(used) > 350, "few tokens would prove little"


def test_any_characters(pair):
    """1,000 texts of any characters, many of which no training text held: the very same ids."""
    _, ours, theirs = pair
    draw = random.Random(2)
    texts = [random_characters(draw) for _ in range(1000)]
    lacking = {i - ours.size for i in ours.encoding.encode("".join(texts)) if i >= ours.size}
    texts = [text for text in texts if not lacking & set(text.encode())]    # see the test below
    assert len(texts) > 50
    wrong = differences(ours, theirs, texts)
    assert not wrong, f"{len(wrong)} differ; the shortest: {min(wrong, key=lambda x: len(x[0]))}"


def test_beginning_of_text(pair):
    """The post-processor's first token stands in front once, unless it is not wanted."""
    kind, ours, theirs = pair
    for text in ("a cat", "", "12 \n"):
        assert ours.encode(text) == theirs.encode(text)
    begin = theirs.convert_tokens_to_ids(SPECIAL[kind][0])
    assert ours.bos == (begin if kind == "llama3" else None)
    assert ours.encode(SPECIAL[kind][0] + "a").count(begin) == 1
    assert ours.eos == {5, theirs.convert_tokens_to_ids(SPECIAL[kind][-1])}
    assert ours.size == len(theirs)


def test_decoding(pair):
    """Token by token, no piece holds half a character and together they are transformers' text."""
    kind, ours, theirs = pair
    draw = random.Random(3)
    held = 0
    for make in (random_text, random_characters) * 200:
        text = make(draw)
        ids = ours.encode(text, bos=False)
        decoder, pieces = ours.decoder(), []
        for i in ids:
            pieces.append(decoder.decode(ours.token_bytes(i)))
            held += bool(ours.token_bytes(i)) and not pieces[-1]
        pieces.append(decoder.decode(b"", final=True))
        whole = b"".join(map(ours.token_bytes, ids)).decode(errors="replace")
        assert "".join(pieces) == whole == theirs.decode(ids)
        if kind != "smollm":                                  # which lacks some bytes
            assert "�" not in whole
            assert whole == (unicodedata.normalize("NFC", text) if kind == "qwen" else text)
    assert held > 200, "characters of several tokens are what this is about"


def test_special_tokens_add_no_text(pair):
    """Special tokens and rows of the table without a token are silent, others are not."""
    kind, ours, theirs = pair
    for token in SPECIAL[kind]:
        assert ours.token_bytes(theirs.convert_tokens_to_ids(token)) == b""
    assert ours.token_bytes(ours.size) == ours.token_bytes(ours.size + 300) == b""
    silent = [i for i in range(ours.size) if not ours.token_bytes(i)]
    assert len(silent) == len(SPECIAL[kind])
    if kind == "qwen":
        assert ours.token_bytes(theirs.convert_tokens_to_ids("<tool_call>")) == b"<tool_call>"


# --------------------------------------------------------------------------------------------------
# Bytes that the vocabulary lacks


def test_bytes_that_the_vocabulary_lacks(tmp_path):
    """They vanish. (Their neighbours do not merge over the gap, as they would in transformers.)"""
    tokenizer = HFTokenizer(models.BPE({"a": 0, "b": 1, "ab": 2, "Ġ": 3}, [("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    write(tmp_path, tokenizer)
    ours = Tokenizer(str(tmp_path), Config())
    for text in ("ab", "z", "zab", "a b", "", "abz zz"):
        assert ours.encode(text) == tokenizer.encode(text).ids, text
    assert ours.encode("azb") == [0, 1]


# --------------------------------------------------------------------------------------------------
# Chat templates

CHATS = [[{"role": "user", "content": " Hello, \n"}],
         [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"},
          {"role": "assistant", "content": "2"}, {"role": "user", "content": "<|eot_id|>é 🙂"}],
         [{"role": "user", "content": "a"}, {"role": "tool", "content": "{\"q\": 'é<>&'}"}],
         [{"role": "user", "content": str(i)} for i in range(9)]]


def their_chat(theirs, chat):
    return theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)[
        "input_ids"]


@pytest.mark.parametrize("where", ["tokenizer_config.json", "chat_template.jinja", "list by name"])
def test_chat_template_equals_transformers(tmp_path, where):
    """Trimming, loop controls, tojson, special tokens: the ids of transformers' own rendering."""
    named = [{"name": "default", "template": LLAMA3_TEMPLATE}, {"name": "tool", "template": "no"}]
    options = {"tokenizer_config.json": dict(chat_template=LLAMA3_TEMPLATE),
               "chat_template.jinja": {}, "list by name": dict(chat_template=named)}[where]
    write(tmp_path, build("llama3"), None, bos_token="<|begin_of_text|>", eos_token="<|eot_id|>",
          **options)
    if where == "chat_template.jinja":
        (tmp_path / where).write_text(LLAMA3_TEMPLATE, encoding="utf-8")
    ours, theirs = Tokenizer(str(tmp_path), Config()), AutoTokenizer.from_pretrained(tmp_path)
    for chat in CHATS:
        want = their_chat(theirs, chat)
        assert ours.chat(chat) == want and len(want) > 10


@pytest.mark.parametrize("template, chat, says", [
    (LLAMA3_TEMPLATE, [{"role": "clown", "content": "x"}], "role clown is unknown"),
    ("{{ messages[0].content + 1 }}", CHATS[0], "refuses"),
    ("{{ messages[0].content.index('?') }}", CHATS[0], "refuses"),
    (LLAMA3_TEMPLATE, [], "refuses"),
    ("{{ messages.append(1) }}", CHATS[0], "refuses"), ("", CHATS[0], "no chat template")])
def test_messages_that_a_template_refuses(tmp_path, template, chat, says):
    """One line that says so; and the sandbox holds."""
    write(tmp_path, build("gpt2"), None, chat_template=template)
    with pytest.raises(UserError) as error:
        Tokenizer(str(tmp_path), Config()).chat(chat)
    assert says in str(error.value) and "\n" not in str(error.value)


def test_a_template_that_cannot_be_read(tmp_path):
    """A template with an error is one clear line, and not jinja's traceback."""
    write(tmp_path, build("gpt2"), None, chat_template="{% for message in messages %}{{ message }")
    with pytest.raises(UserError, match="template") as error:
        Tokenizer(str(tmp_path), Config())
    assert "\n" not in str(error.value)


# --------------------------------------------------------------------------------------------------
# Kinds that are not supported


def other_kind(kind):
    """A tokenizer of a kind that this project does not read; or one step away from one it reads."""
    texts, tokenizer = list(corpus(random.Random(0))), build("llama3")
    if kind == "Unigram":
        tokenizer = HFTokenizer(models.Unigram())
        tokenizer.train_from_iterator(texts, UnigramTrainer(vocab_size=300, show_progress=False))
    if kind == "WordPiece":
        tokenizer = HFTokenizer(models.WordPiece(unk_token="[UNK]"))
        tokenizer.train_from_iterator(texts, WordPieceTrainer(show_progress=False))
    if kind == "Metaspace":                                    # Llama 2: BPE over letters
        tokenizer = HFTokenizer(models.BPE(byte_fallback=True))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.train_from_iterator(texts, BpeTrainer(vocab_size=300, show_progress=False))
    if kind == "lowercase":
        tokenizer.normalizer = normalizers.Lowercase()
    if kind == "prefix space":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    if kind == "no regex":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if kind in ("removed", "merged", "inverted", "prefix after split", "regex after split"):
        behavior = {"removed": "removed", "merged": "merged_with_next"}.get(kind, "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
            pre_tokenizers.Split(Regex(QWEN_SPLIT), behavior, invert=kind == "inverted"),
            pre_tokenizers.ByteLevel(add_prefix_space=kind == "prefix after split",
                                     use_regex=kind == "regex after split")])
    if kind == "three steps":
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
            pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated"), pre_tokenizers.Split(
                Regex(r"\s+"), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)])
    if kind == "rstrip":                                       # swallows the spaces that follow
        tokenizer.add_special_tokens([AddedToken("<|end|>", rstrip=True)])
    if kind == "single word":
        tokenizer.add_special_tokens([AddedToken("end", single_word=True)])
    return tokenizer


@pytest.mark.parametrize("kind", [
    "Unigram", "WordPiece", "Metaspace", "lowercase", "prefix space", "no regex", "removed",
    "merged", "inverted", "prefix after split", "regex after split", "three steps", "rstrip",
    "single word"])
def test_other_kinds_are_refused_or_read_right(tmp_path, kind):
    """A kind that is not supported is one clear line that names the file; never other ids."""
    tokenizer = other_kind(kind)
    write(tmp_path, tokenizer)
    try:
        ours = Tokenizer(str(tmp_path), Config())
    except UserError as error:
        assert "tokenizer.json" in str(error) and "\n" not in str(error)
        return
    assert kind not in ("Unigram", "WordPiece", "Metaspace", "lowercase", "prefix space")
    draw = random.Random(4)
    for text in ("the end <|end|>  of it, friend", *(random_text(draw) for _ in range(200))):
        want = tokenizer.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, bos=False) == want, text


def test_merges_out_of_order_and_files_absent(tmp_path):
    """tiktoken merges by id: a file whose merges are in another order is refused; as is no file,
    and one that lacks what its merges make, or its model."""
    with pytest.raises(UserError, match="tokenizer.json"):
        Tokenizer(str(tmp_path), Config())
    vocab = {"a": 0, "b": 1, "c": 2, "bc": 3, "ab": 4}
    tokenizer = HFTokenizer(models.BPE(vocab, [("a", "b"), ("b", "c")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    write(tmp_path, tokenizer)
    assert tokenizer.encode("abc").ids == [4, 2]
    with pytest.raises(UserError, match="order"):
        Tokenizer(str(tmp_path), Config())
    for spoil in (lambda spec: spec["model"]["vocab"].pop("ab"), lambda spec: spec.pop("model")):
        write(tmp_path, tokenizer, spoil)
        with pytest.raises(UserError, match="byte-level BPE"):
            Tokenizer(str(tmp_path), Config())


def test_raw_tokens():
    """A random: model's text is its ids, there and back."""
    raw = RawTokens(Config(vocab=100))
    assert raw.encode("17 4\n 99") == [17, 4, 99] and raw.encode("") == []
    assert b"".join(map(raw.token_bytes, [17, 4, 99])).decode().split() == ["17", "4", "99"]
    for bad in ("hello", "1 x", "4.5"):
        with pytest.raises(UserError) as error:
            raw.encode(bad)
        assert "\n" not in str(error.value) and bad in str(error.value)
    with pytest.raises(UserError, match="completions"):
        raw.chat([])


# --------------------------------------------------------------------------------------------------
# The small model of this repository

TINY = Path(__file__).parent.parent / "assets" / "tiny"


@pytest.mark.skipif(not (TINY / "model.safetensors").exists(), reason="assets/tiny is not here")
def test_the_small_model_of_this_repository():
    """assets/tiny through our files and transformers': the same ids, chats and logits."""
    config = Config.read(TINY)
    ours, theirs = Tokenizer(str(TINY), config), AutoTokenizer.from_pretrained(TINY)
    draw = random.Random(5)
    special = [t for t in theirs.all_special_tokens if t]
    texts = [random_text(draw, special) for _ in range(1000)] + list(corpus(draw))
    wrong = differences(ours, theirs, texts)
    assert not wrong, f"{len(wrong)} differ; the shortest: {min(wrong, key=lambda x: len(x[0]))}"
    for text in texts[:50]:
        if ours.bos is None or not text.startswith(ours.bos_token):
            assert ours.encode(text) == theirs.encode(text)
    chat = [{"role": "user", "content": "Tell me a story about a fox."}]
    prompt = ours.chat(chat)
    assert prompt == their_chat(theirs, chat)
    layout, link = Layout(1, 1, config.heads, config.kv_heads, config.ffn), NoLink()
    model = Llama(config, Checkpoint(TINY, config), layout, link, both_modes(layout, link), 256,
                  torch.float32, TorchKernels())
    texts = [prompt, ours.encode("Once upon a time there was a little fox. " * 3)]
    for text, want in zip(texts, oracle_logits(TINY, texts)):
        work, blocks = requests([text])
        model.allocate_kv(blocks, 4)
        got, _ = model.forward(step([(work[0], len(text))]), model.shift)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-3)
    assert ours.eos & set(config.eos), "the model must know how a text ends"
