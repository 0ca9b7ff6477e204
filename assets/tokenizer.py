"""tokenizer.py: text to token ids and back, from the files of a Hugging Face model.

What it does: builds a tiktoken Encoding from tokenizer.json, and renders the chat template.
What it does not know: what a model does with the ids.
"""
import codecs
import json
import unicodedata
from datetime import datetime
from functools import partial
from pathlib import Path

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from model import read_json
from shift import UserError

# What GPT-2 splits by, and the same with every digit on its own (SmolLM2)
GPT2_SPLIT = (r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
DIGITS_SPLIT = (r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+")


def byte_letters():
    """The letter that stands for each byte in byte-level BPE files (GPT-2): printable bytes stand
    for themselves, the other 68 for the letters from 256 up."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(rest)}


class Tokenizer:
    """A tiktoken Encoding built from Hugging Face's tokenizer.json: byte-level BPE of the GPT-2,
    Llama 3, Qwen and SmolLM families; and the model's chat template, in jinja2's sandbox."""

    def __init__(self, directory, config):
        import tiktoken                             # slow, and not every rank needs it
        file = f"{directory}/tokenizer.json"
        spec = read_json(directory, "tokenizer.json")
        names = read_json(directory, "tokenizer_config.json", default={})
        model, normalizer = spec.get("model") or {}, spec.get("normalizer") or {}
        if model.get("type") != "BPE" or normalizer.get("type", "NFC") != "NFC":
            raise UserError(f"{file}: only byte-level BPE is supported (GPT-2, Llama 3, Qwen, "
                            f"SmolLM), not {model.get('type')} with normalizer "
                            f"{normalizer.get('type')}")
        added, texts = {}, {}
        for token in spec.get("added_tokens", []):
            if token.get("lstrip") or token.get("rstrip") or token.get("single_word"):
                raise UserError(f"{file}: added token {token['content']!r} takes more or less than "
                                f"its own text (lstrip, rstrip, single_word): not supported")
            added[token["content"]] = token["id"]
            texts[token["id"]] = b"" if token.get("special") else token["content"].encode()
        letters = byte_letters()
        try:
            ranks = {bytes(letters[c] for c in token): i
                     for token, i in model["vocab"].items() if token not in added}
            made = [model["vocab"]["".join(pair).replace(" ", "")]        # of "a b", or ["a", "b"]
                    for pair in model["merges"]]
        except KeyError as e:
            raise UserError(f"{file}: not byte-level BPE ({e} is lacking, or no byte's letter)")
        if list(dict.fromkeys(made)) != sorted(set(made)):                # tiktoken merges by id
            raise UserError(f"{file}: its merges are not in the order of the ids they make")
        self.bytes = {i: token for token, i in ranks.items()} | texts
        self.size = 1 + max(self.bytes)
        for byte in range(256):                     # what the vocabulary lacks, encode drops; it
            # does not join what was on both sides of it, as transformers would
            ranks.setdefault(bytes([byte]), self.size + byte)
        self.encoding = tiktoken.Encoding("model", pat_str=split_pattern(spec, file),
                                          mergeable_ranks=ranks, special_tokens=added)
        self.nfc = bool(normalizer)
        named = [names.get(key) or "" for key in ("bos_token", "eos_token")]
        self.bos_token, self.eos_token = (token["content"] if isinstance(token, dict) else token
                                          for token in named)
        self.eos = {*config.eos, added.get(self.eos_token)} - {None}
        self.bos = first_special(spec, added)       # put in front of a plain prompt, if at all
        self.template = chat_template(directory, names)

    def encode(self, text, bos=True):
        """Text -> ids. Special tokens written out in it count as themselves, as in transformers; a
        beginning-of-text token is put in front unless there is one already."""
        text = unicodedata.normalize("NFC", text) if self.nfc else text
        try:
            ids = [i for i in self.encoding.encode(text, allowed_special="all") if i < self.size]
        except ValueError as e:                     # the regular expression gave up
            raise UserError(f"a text of {len(text)} characters cannot be cut into words: {e}")
        return [self.bos] + ids if bos and self.bos is not None and ids[:1] != [self.bos] else ids

    def token_bytes(self, token):
        """What a token adds to the output; special tokens and padding rows add nothing."""
        return self.bytes.get(token, b"")

    def decoder(self):
        """Bytes in, text out, never half a character: `decode(bytes, final=False)`."""
        return codecs.getincrementaldecoder("utf-8")(errors="replace")

    def chat(self, messages):
        """Messages (role, content) -> the ids of the prompt, by the model's own template."""
        if self.template is None:
            raise UserError("this model has no chat template: use /v1/completions")
        try:
            text = self.template.render(messages=messages, add_generation_prompt=True, tools=None,
                                        bos_token=self.bos_token, eos_token=self.eos_token)
        except Exception as e:                      # a template is a program: any may be raised
            raise UserError(f"the chat template refuses these messages: {e}") from None
        return self.encode(text, bos=False)         # the template writes the beginning-of-text


def chat_template(directory, names):
    """The model's chat template, compiled, or None: a file of its own, else in tokenizer_config."""
    path, source = Path(directory) / "chat_template.jinja", names.get("chat_template")
    if path.is_file():
        source = path.read_text(encoding="utf-8")
    if isinstance(source, list):                    # several, by name
        source = {one["name"]: one["template"] for one in source}.get("default")
    if not source:
        return None

    def refuse(message):
        raise TemplateError(message)
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                        extensions=["jinja2.ext.loopcontrols"])
    env.globals.update(raise_exception=refuse,
                       strftime_now=lambda pattern: datetime.now().strftime(pattern))
    env.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    try:
        return env.from_string(source)
    except TemplateError as e:
        raise UserError(f"{directory}: the chat template cannot be read: {e}") from None


def split_pattern(spec, file):
    """The regular expression that cuts text into words before BPE, from the pre_tokenizer."""
    first = spec.get("pre_tokenizer") or {}
    steps = [{"use_regex": True, **step} for step in first.get("pretokenizers", [first])]
    match steps:
        case [{"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}]:
            return GPT2_SPLIT
        case [{"type": "Digits", "individual_digits": True},
              {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}]:
            return DIGITS_SPLIT
        case [{"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated",
               "invert": False},
              {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}]:
            return pattern                          # Llama 3, Qwen
    raise UserError(f"{file}: this kind of pre_tokenizer, {[step.get('type') for step in steps]}, "
                    f"is not supported (those of GPT-2, Llama 3, Qwen and SmolLM are)")


def first_special(spec, added):
    """The id that the post_processor puts in front of every text, or None."""
    first = spec.get("post_processor") or {}
    for step in first.get("processors", [first]):
        match step:
            case {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": token}}, *_]}:
                return added[token]


class RawTokens:
    """The tokenizer of `random:` models, which know no words: "17 4 99" is three token ids."""
    eos, bos = frozenset(), None

    def __init__(self, config):
        self.vocab = config.vocab

    def encode(self, text, bos=True):
        try:
            return [int(word) for word in text.split()]
        except ValueError:
            raise UserError(f"a random: model knows no words, only token ids below {self.vocab}, "
                            f"such as [17, 4] or \"17 4\"; not {text[:40]!r}") from None

    def token_bytes(self, token):
        return f"{token} ".encode()

    decoder = Tokenizer.decoder

    def chat(self, messages):
        raise UserError("a random: model has no chat template: use /v1/completions")
