"""Records -> tokens, with a mark on each token that is trained.

A stock chat template marks nothing, so the assistant's tokens are found by rendering prefixes of the conversation with the
tokenizer's own template:

    before   turns 0..i-1 and the generation prompt: what the model is given when it has to answer
    after    turns 0..i
    trained  what `after` has beyond `before`, up to the token that ends the turn

This is only right where each prefix is a beginning of the whole, as text and as token ids. A template that rewrites earlier
turns (one that removes the thoughts of all answers but the last, say) is refused: trained on the whole, the model would never
see what it is given later.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import OnDisk, UsageError

_CHUNK = 1 << 20  # characters a text is tokenised in at once: bounds memory, and lets a batch use all cores


@dataclass(frozen=True)
class Document:
    """The tokens of one record, int64 ``[length]``; ``marks`` says which are trained, None for all."""

    tokens: npt.NDArray[np.int64]
    marks: npt.NDArray[np.bool_] | None


class Encoder:
    """A tokenizer, and what has to be known of it once.

    Attributes:
        bos: Ids that the tokenizer puts before a text by itself; empty for most.
        eos: The id that ends a text.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        bare, full = self.ids(["a"])[0], tokenizer("a", verbose=False)["input_ids"]
        self.bos: list[int] = full[: full.index(bare[0])] if bare and bare[0] in full else []
        self.eos: int | None = tokenizer.eos_token_id
        self.has_template = bool(getattr(tokenizer, "chat_template", None))
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self.special = {*tokenizer.all_special_ids, *(i for i, token in added.items() if token.special)}

    def ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, nothing added."""
        if not texts:
            return []
        found: list[list[int]] = self.tokenizer(
            list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False
        )["input_ids"]
        return found

    def texts(self, texts: Sequence[str]) -> list[Document]:
        """Whole texts: begin token if the tokenizer adds one, the text, end token. All trained."""
        chunks = [_chunks(text) for text in texts]
        ids = iter(self.ids([chunk for parts in chunks for chunk in parts]))
        out = []
        for parts in chunks:
            tokens = [*self.bos]
            for _ in parts:
                tokens += next(ids)
            out.append(Document(np.array([*tokens, *self._end(tokens)], np.int64), None))
        return out

    def prompts(self, pairs: Sequence[tuple[str, str]]) -> list[Document]:
        """Prompt and completion: trained are the completion and the end token.

        The prompt's ids are those it has alone, as when the model is asked. Where the two texts grow into one token at the
        border, the completion is tokenised alone too.
        """
        prompts, wholes = self.ids([p for p, _ in pairs]), self.ids([p + c for p, c in pairs])
        out = []
        for (_, completion), prompt, whole in zip(pairs, prompts, wholes, strict=True):
            rest = whole[len(prompt) :] if whole[: len(prompt)] == prompt else self.ids([completion])[0]
            trained = [*rest, *self._end(rest)]
            marks = np.zeros(len(self.bos) + len(prompt) + len(trained), np.bool_)
            marks[len(self.bos) + len(prompt) :] = True
            out.append(Document(np.array([*self.bos, *prompt, *trained], np.int64), marks))
        return out

    def chats(self, conversations: Sequence[tuple[list[dict[str, Any]], str]]) -> list[Document]:
        """Conversations, each with its place for messages: trained is what the assistant says, to the end of its turn.

        Raises:
            UsageError: The template is not prefix-stable; names the turn and shows both token tails.
            OnDisk: The template refuses the conversation.
        """
        rendered = [self._render(messages, place) for messages, place in conversations]
        pieces = [[text[a:b] for a, b in _stretches(spans, len(text))] for text, spans in rendered]
        ids = iter(self.ids([t for (text, _), parts in zip(rendered, pieces, strict=True) for t in (text, *parts)]))
        out = []
        for (text, spans), parts, (messages, place) in zip(rendered, pieces, conversations, strict=True):
            whole, ends = next(ids), [0]
            joined: list[int] = []
            for _ in parts:
                joined += next(ids)
                ends.append(len(joined))
            if (
                joined != whole
            ):  # pieces alone have other ids, as where a tokenizer puts a space before each text: compare whole prefixes
                ends = self._prefix_ends(text, spans, whole, messages, place)
            marks = np.zeros(len(whole), np.bool_)
            for begin, end in zip(ends[1::2], ends[2::2], strict=False):
                marks[begin : self._turn_end(whole, begin, end)] = True
            out.append(Document(np.array(whole, np.int64), marks))
        return out

    def _end(self, tokens: list[int]) -> list[int]:
        return [] if self.eos is None or tokens[-1:] == [self.eos] else [self.eos]

    def _turn_end(self, whole: list[int], begin: int, end: int) -> int:
        """Where training stops inside ``whole[begin:end]``: behind the last special token if only white space follows it.

        The model stops at that token when it answers; the line break that many templates put behind it is never its own.
        """
        for at in range(end - 1, begin - 1, -1):
            if whole[at] in self.special:
                return at + 1 if not self.tokenizer.decode(whole[at + 1 : end]).strip() else end
        return end

    def _render(self, messages: list[dict[str, Any]], place: str) -> tuple[str, list[tuple[int, int, int]]]:
        """The conversation as text, and ``(turn, begin, end)`` in characters of what each assistant turn is trained on."""
        whole = self._template(messages, place)
        spans: list[tuple[int, int, int]] = []
        for turn, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._template(messages[:turn], place, add_generation_prompt=True)
            after = whole if turn == len(messages) - 1 else self._template(messages[: turn + 1], place)
            for prefix in (before, after):
                if not whole.startswith(prefix):
                    raise self._unstable(self.ids([prefix])[0], self.ids([whole])[0], turn, place, asked=prefix is before)
            begin = max(len(before), spans[-1][2] if spans else 0)
            if len(after) > begin:
                spans.append((turn, begin, len(after)))
        return whole, spans

    def _template(self, messages: list[dict[str, Any]], place: str, *, add_generation_prompt: bool = False) -> str:
        try:
            text: str = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
        except Exception as error:
            roles = ", ".join(m["role"] for m in messages) or "no turn"
            raise OnDisk(
                "the chat template refuses a conversation",
                where=place,
                why=textwrap.fill(str(error) or type(error).__name__, 68),
                lines=[("roles", textwrap.shorten(roles, 68, placeholder=" ..."))],
            ) from error
        return text

    def _prefix_ends(
        self, text: str, spans: list[tuple[int, int, int]], whole: list[int], messages: list[dict[str, Any]], place: str
    ) -> list[int]:
        """Borders of the stretches in tokens, each prefix tokenised by itself; quadratic in turns, so only where pieces will not
        do."""
        ends = [0]
        for turn, begin, end in spans:
            for border in (begin, end):
                prefix = self.ids([text[:border]])[0]
                if whole[: len(prefix)] != prefix:
                    raise self._unstable(prefix, whole, turn, place, asked=border == begin)
                ends.append(len(prefix))
        return ends

    def _unstable(self, prefix: list[int], whole: list[int], turn: int, place: str, *, asked: bool) -> UsageError:
        same = next((i for i, (a, b) in enumerate(zip(prefix, whole, strict=False)) if a != b), min(len(prefix), len(whole)))
        name = f"turn {turn + 1}" + (", where the answer begins" if asked else ", where the answer ends")
        return UsageError(
            "the chat template is not prefix-stable: it writes earlier tokens\n       differently once later turns are there",
            where=place,
            lines=[("turn", name), ("prefix", self._tail(prefix, same)), ("whole", self._tail(whole, same))],
            why="which tokens are the assistant's cannot be told, and the model would be\ntrained on text that it is never given",
            hints=[
                "put a `chat_template.jinja` that renders every turn alike into the\n      tokenizer's folder",
                "cut the data into conversations with one answer each",
            ],
        )

    def _tail(self, ids: list[int], same: int) -> str:
        """The tokens around the first that differs, at most 60 columns."""
        shown = [repr(self.tokenizer.decode([i])) for i in ids[max(same - 3, 0) : same + 4]]
        while len(" ".join(shown)) > 56 and len(shown) > 1:
            shown.pop()
        return ("... " if same > 3 else "") + (" ".join(shown) or "(nothing)")[:56]


def _stretches(spans: list[tuple[int, int, int]], length: int) -> list[tuple[int, int]]:
    """``[0, length)`` cut at every border of the spans: not trained, trained, not trained, ..."""
    borders = [0, *(b for _, begin, end in spans for b in (begin, end)), length]
    return list(pairwise(borders))


def _chunks(text: str) -> list[str]:
    """A long text in parts that are tokenised as the whole would be: cut behind a single line break between two characters that
    are not space."""
    parts, begin = [], 0
    while len(text) - begin > _CHUNK:
        at = text.find("\n", begin + _CHUNK)
        while at != -1 and (text[at - 1].isspace() or text[at + 1 : at + 2].isspace()):
            at = text.find("\n", at + 1)
        if at == -1:
            break
        parts.append(text[begin : at + 1])
        begin = at + 1
    return [*parts, text[begin:]]
