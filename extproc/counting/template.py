"""Chat templates, rendered as transformers renders them for an engine.

The environment is transformers': sandboxed, `trim_blocks`, `lstrip_blocks`, loop controls, a `tojson` that escapes
nothing, `raise_exception` and `strftime_now`. Templates come from the model directory and are trusted; what they
render is a client's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import datetime
from types import BuiltinMethodType
from typing import Any, NamedTuple, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils

from extproc.counting.fields import as_object, malformed

RENDERED_CHARS_MAX = 64 * 2**20
"""Longest rendered prompt. Templates repeat little of their input, so this is far above what any body within the
largest body limit renders to in a context that exists; it keeps one request from holding the tokenizer for minutes."""

_CONTINUE_MARK = "TOKENLANE_FINAL_MESSAGE_END "

_RESERVED_TEMPLATE_VARIABLES = frozenset(
    {
        "chat_template",
        "conversation",
        "max_length",
        "messages",
        "model_config",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tokenizer",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)
"""Names that a request's `chat_template_kwargs` may not set: arguments of the rendering itself."""

Message = dict[str, Any]


class Chat(NamedTuple):
    """What a template prints. `variables` are the request's own; a template sees those that it names."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None
    documents: object
    add_generation_prompt: bool
    continue_final_message: bool
    variables: Mapping[str, object]


def template_variables(name: str, value: object) -> dict[str, object]:
    """A request's own variables for a template; Fault for one that it may not set."""
    variables = as_object(name, value)
    for key in _RESERVED_TEMPLATE_VARIABLES.intersection(variables):
        raise malformed(f"{name} cannot set {key}", f"{name}.{key}")
    return variables


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks assistant text for training; for rendering it is transparent."""

    tags = {"generation"}  # noqa: RUF012 (the attribute as jinja2 declares it)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)  # noqa: DTZ005 (local time, as the engine's own template function)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


_DICT_NAMES = frozenset(dir(dict))

_TEXT_METHODS = frozenset(name for name in dir(str) if not name.startswith("_")) - {"format", "format_map"}
"""Methods of text that the sandbox lets through as they are; it wraps those that format."""


_PLAIN_KINDS = (jinja2.utils.Namespace, jinja2.runtime.LoopContext)
"""Jinja's own objects, whose public attributes the sandbox lets through as they are."""


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox, with a short way to the keys of JSON objects, to the methods of text and to Jinja's own objects."""

    def getattr(self, obj: Any, attribute: str) -> Any:  # noqa: ANN401 (the signature of the base)
        """The attribute, else the key, else undefined. What no dict has as an attribute is a key at once."""
        kind = type(obj)
        if kind is dict and attribute not in _DICT_NAMES:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if (kind is str and attribute in _TEXT_METHODS) or (kind in _PLAIN_KINDS and attribute[:1] != "_"):
            try:
                return getattr(obj, attribute)
            except AttributeError:
                return self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)

    def call(self, context: jinja2.runtime.Context, obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """The result of calling `obj`. Text methods and `namespace` need neither the context nor a look at flags."""
        if obj is jinja2.utils.Namespace or (
            type(obj) is BuiltinMethodType and type(obj.__self__) is str and obj.__name__ in _TEXT_METHODS
        ):
            kwargs.pop("_loop_vars", None)
            kwargs.pop("_block_vars", None)
            return obj(*args, **kwargs)
        return super().call(context, obj, *args, **kwargs)


def _environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """One compiled template.

    `parts_as_list`: the template loops over the parts of a message's content, so content reaches it as a list.
    `content_loops`: names of variables whose `content` some loop runs over.
    `variables`: the names a request may set; others never reach the template.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = _environment()
        tree = environment.parse(source)
        self._template = environment.from_string(source)
        self._base = {**self._template.globals, **special_tokens}
        self.variables = frozenset(jinja2.meta.find_undeclared_variables(tree))
        self.content_loops = _content_loops(tree)
        self.parts_as_list = bool(self.content_loops & _message_names(tree))
        self.source = source
        self.knows_developer = "developer" in source

    def render(self, chat: Chat) -> str:
        """The prompt; Fault(MALFORMED_REQUEST) for whatever the template or its expressions refuse."""
        messages, ending = _with_mark(chat.messages) if chat.continue_final_message else (chat.messages, "")
        own = {key: value for key, value in chat.variables.items() if key in self.variables}
        context = {
            **self._base,
            **own,
            "messages": messages,
            "tools": chat.tools,
            "documents": chat.documents,
            "add_generation_prompt": chat.add_generation_prompt,
        }
        try:
            # `Template.render` without its copies of the variables and its rewriting of tracebacks.
            text = "".join(self._template.root_render_func(self._template.new_context(context, shared=True)))
        except Exception:  # noqa: BLE001 (a template is code: whatever it raises, the engine would raise too)
            # What it raised can quote the prompt, so it goes no further.
            raise malformed("the model's chat template cannot render these messages", "messages") from None
        if len(text) > RENDERED_CHARS_MAX:
            raise malformed("the rendered prompt is too large", "messages")
        return _cut_at_mark(text, ending) if chat.continue_final_message else text


def _with_mark(messages: list[Message]) -> tuple[list[Message], str]:
    """`messages` with a mark after the last message's text, and that text."""
    last = messages[-1]
    content = last["content"]
    if isinstance(content, str):
        return [*messages[:-1], {**last, "content": content + _CONTINUE_MARK}], content
    for index in range(len(content) - 1, -1, -1):
        if "text" in content[index]:
            text = content[index]["text"]
            marked = [*content[:index], {**content[index], "text": text + _CONTINUE_MARK}, *content[index + 1 :]]
            return [*messages[:-1], {**last, "content": marked}], text
    raise malformed("continue_final_message needs a final message with text", "continue_final_message")


def _cut_at_mark(text: str, ending: str) -> str:
    """The prompt up to the mark; spaces before it go where the template strips them from messages."""
    mark = _CONTINUE_MARK.strip()
    if mark not in text or ending.strip() not in text:
        raise malformed("the chat template does not print the final message", "continue_final_message")
    at = text.rindex(mark)
    kept = text.startswith(_CONTINUE_MARK, at)
    return text[:at] if kept else text[:at].rstrip()


def _content_loops(tree: jinja2.nodes.Template) -> frozenset[str]:
    names = {node.name for node in tree.find_all(jinja2.nodes.Name)}
    iterated = [loop.iter for loop in tree.find_all(jinja2.nodes.For)]
    return frozenset(name for name in names if any(_reads(node, name, "content") for node in iterated))


def _message_names(tree: jinja2.nodes.Template) -> set[str]:
    """Variables of the loops over `messages`: vLLM's rule for the "openai" format looks at their content."""
    lists = _names_assigned_from(tree, "messages")
    return {
        loop.target.name
        for loop in tree.find_all(jinja2.nodes.For)
        if isinstance(loop.target, jinja2.nodes.Name) and any(_reads(loop.iter, name) for name in lists)
    }


def _names_assigned_from(tree: jinja2.nodes.Template, name: str) -> set[str]:
    """`name` and every variable set to it or to a slice or filter of it, transitively."""
    names = {name}
    while True:
        found = {
            node.target.name
            for node in tree.find_all(jinja2.nodes.Assign)
            if isinstance(node.target, jinja2.nodes.Name) and any(_reads(node.node, known) for known in names)
        }
        if found <= names:
            return names
        names |= found


def _reads(node: jinja2.nodes.Node | None, name: str, key: str | None = None) -> bool:
    """Whether `node` is the variable `name`, or its element `key`, under any slices, filters and tests."""
    for inner in _unwrapped(node):
        node = inner
    if key is not None:
        if isinstance(node, jinja2.nodes.Getitem):
            matches = isinstance(node.arg, jinja2.nodes.Const) and node.arg.value == key
        else:
            matches = isinstance(node, jinja2.nodes.Getattr) and node.attr == key
        if not matches:
            return False
        node = node.node  # type: ignore[union-attr]
    return isinstance(node, jinja2.nodes.Name) and node.ctx == "load" and node.name == name


def _unwrapped(node: jinja2.nodes.Node | None) -> Iterator[jinja2.nodes.Node | None]:
    while isinstance(node, jinja2.nodes.Filter | jinja2.nodes.Test) or (
        isinstance(node, jinja2.nodes.Getitem) and isinstance(node.arg, jinja2.nodes.Slice)
    ):
        node = node.node
        yield node
