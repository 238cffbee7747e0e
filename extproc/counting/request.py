"""What a profile makes of a request body: the prompts that run, and what bounds their output.

A profile is one engine's rules: a table of readers by endpoint. A reader checks a parsed body as the engine would and
returns `Read`; whatever the engine would refuse, and whatever would run something else than was counted, is a Fault.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from extproc.counting.media import NO_CHARGES, Charges
from extproc.counting.template import ChatTemplate


class Prompts(NamedTuple):
    """What runs: texts to tokenize, or lengths of prompts that came as ids; one of the two is empty.

    Each text is a prompt, or `texts_per_prompt` says how many make up each, tokenized one by one. `counted_by`
    tokenizes texts that are no backend's: conversations that a library renders and tokenizes in one. `media_tokens` are
    the charges of each prompt's media, where there are any.
    """

    texts: tuple[str, ...]
    lengths: tuple[int, ...]
    add_special_tokens: bool
    texts_per_prompt: tuple[int, ...] = ()
    counted_by: Callable[[Sequence[str]], Sequence[int]] | None = None
    media_tokens: tuple[int, ...] = ()

    def with_media(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """`tokens` of each prompt and what its media are charged."""
        if not self.media_tokens:
            return tuple(tokens)
        return tuple(map(operator.add, tokens, self.media_tokens))

    def joined(self, counts: Sequence[int]) -> tuple[int, ...]:
        """The tokens of each prompt, from those of each text."""
        if not self.texts_per_prompt:
            return tuple(counts)
        found = iter(counts)
        return tuple(sum(itertools.islice(found, texts)) for texts in self.texts_per_prompt)


class Asked(NamedTuple):
    """What a checked body asks for besides its prompts.

    `output_tokens` is the client's ceiling, in `ceiling_field`; where it is None a default holds: `default_tokens`, or
    the policy's where that is None too. A ceiling written to the field at `written` (keys from the outside in) is the
    one that the engine obeys; `written_is_new` when the body does not have that field yet. `truncate_tokens` keeps
    that many tokens of a prompt; -1 keeps what the context has room for. Where `generates` is False nothing runs but
    the prompt, and no ceiling is written. `lowered`: the body declares that bulk service is enough. `removed`
    names the fields that the engine must not see.
    """

    ceiling_field: str = ""
    output_tokens: int | None = None
    default_tokens: int | None = None
    written: tuple[str, ...] = ()
    written_is_new: bool = False
    sequences_per_prompt: int = 1
    min_tokens: int = 0
    truncate_tokens: int | None = None
    generates: bool = True
    lowered: bool = False
    removed: tuple[str, ...] = ()


def asked_of(
    values: Mapping[str, Any],
    names: tuple[str, ...],
    default_tokens: int | None = None,
    within: tuple[str, ...] = (),
) -> Asked:
    """What the fields `n`, `min_tokens` and those of the ceiling ask for.

    `names` are the ceiling's fields: the first that is not null holds, and the last one stands for a default. `values`
    are those of the object at `within`, of the whole body where that is empty.
    """
    place = next((index for index, name in enumerate(names) if values.get(name) is not None), len(names) - 1)
    field = names[place]
    # A field of equal or higher precedence decides; one that the body lacks can be added without touching the rest.
    free = [name for name in names[: place + 1] if name not in values]
    return Asked(
        ceiling_field=".".join((*within, field)),
        output_tokens=values.get(field),
        default_tokens=default_tokens,
        written=(*within, free[-1] if free else field),
        written_is_new=bool(free),
        sequences_per_prompt=values.get("n") or 1,
        min_tokens=values.get("min_tokens", 0),
    )


def is_lowered(values: Mapping[str, Any]) -> bool:
    """Whether a body declares that bulk service is enough: OpenAI's tier for work that can wait."""
    return values.get("service_tier") == "flex"


Read = tuple[Asked, Callable[[], Prompts]]
"""A checked body, and what renders its prompts: the dear part, which may still raise Fault."""


Chats = Callable[[Sequence[list[Any]], Mapping[str, Any]], Prompts]


@dataclass(frozen=True, slots=True)
class Tools:
    """What readers need of a model: its chat templates by name, and the largest id of a prompt of ids.

    `chats` makes prompts of conversations and the options of a chat, where no template does. `media` are the charges of
    media parts.
    """

    templates: Mapping[str, ChatTemplate]
    token_id_max: int
    chats: Chats | None = None
    media: Charges = field(default_factory=lambda: NO_CHARGES)


Reader = Callable[[Mapping[str, Any], Tools], Read]
