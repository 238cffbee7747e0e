"""Chat templates see messages as the engine shapes them."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from extproc.core.values import Fault, Reason
from extproc.counting.template import Chat, ChatTemplate
from extproc.counting.vllm.conversation import conversation, tools_as_rendered

PLAIN = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}{% if add_generation_prompt %}>{% endif %}"
TRIMMING = "{% for m in messages %}[{{ m.content | trim }}]{% endfor %}"


def rendered(source: str, messages: list[dict[str, Any]], **changes: Any) -> str:
    """`messages` through a template."""
    template = ChatTemplate(source, {"bos_token": "<s>"})
    shaped = conversation(messages, parts_as_list=template.parts_as_list, knows_developer=template.knows_developer)
    fields: dict[str, Any] = {
        "tools": None,
        "documents": None,
        "add_generation_prompt": True,
        "continue_final_message": False,
        "variables": {},
        **changes,
    }
    return template.render(Chat(messages=shaped, **fields))


def says(content: Any, role: str = "user", **fields: Any) -> dict[str, Any]:
    """One message."""
    return {"role": role, "content": content, **fields}


@pytest.mark.parametrize(
    ("source", "as_list"),
    [
        (PLAIN, False),
        ("{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}", True),
        ("{% for m in messages %}{% for p in m['content'] %}{{ p.text }}{% endfor %}{% endfor %}", True),
        ("{% set x = messages[1:] %}{% for m in x %}{% for p in m.content | list %}{% endfor %}{% endfor %}", True),
        ("{% for m in messages %}{% for c in m.tool_calls %}{% endfor %}{% endfor %}", False),
        ("{% for m in other %}{% for p in m.content %}{% endfor %}{% endfor %}", False),
    ],
)
def test_content_is_a_list_where_the_template_loops_over_it(source: str, as_list: bool) -> None:
    """A loop over the content of a loop over the messages makes content a list of parts."""
    assert as_list is ChatTemplate(source, {}).parts_as_list


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (says([{"type": "text", "text": "a"}, {"type": "text", "text": ""}, "b"]), "[user:a\nb]>"),
        (says([{"type": "input_text", "text": "a"}, {"type": "refusal", "refusal": "no"}]), "[user:a\nno]>"),
        (says([{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": None}]), "[user:hm]>"),
        (says([]), "[user:]>"),
        (says(None, "assistant"), "[assistant:]>"),
        ({"role": "user"}, "[user:]>"),
        (says("x-anthropic-billing-header: 1\nrest", "system"), "[system:rest]>"),
        (says("x-anthropic-billing-header: 1", "system"), "[system:]>"),
        (says("x-anthropic-billing-header: 1"), "[user:x-anthropic-billing-header: 1]>"),
        (says([{"type": "tool_reference", "name": "f"}], "tool"), "[tool:f]>"),
    ],
)
def test_content_becomes_text(message: dict[str, Any], text: str) -> None:
    """Parts are joined by newlines without the empty ones; null and absent content are empty."""
    assert text == rendered(PLAIN, [message])


def test_list_template_gets_parts() -> None:
    """A template that loops over parts gets a list, with one part for a string and none for null."""
    source = "{% for m in messages %}{% for p in m.content %}({{ p.type }}:{{ p.text }}){% endfor %}|{% endfor %}"
    messages = [says("a"), says(None, "assistant"), says(["b", {"type": "text", "text": ""}])]

    assert "(text:a)||(text:b)(text:)|" == rendered(source, messages)


def test_tool_result_is_text_for_a_list_template() -> None:
    """Results of tools are joined to a string, also for a template that takes lists."""
    source = "{% for m in messages %}{% for p in m.content %}{{ p }};{% endfor %}{% endfor %}"

    assert "a;\n;b;" == rendered(source, [says(["a", "b"], "tool")])


def test_developer_becomes_system_where_the_template_does_not_know_it() -> None:
    """All system and developer messages merge into one at the front."""
    messages = [says("s", "system"), says("q"), says("d", "developer")]

    assert "[system:s\n\nd][user:q]>" == rendered(PLAIN, messages)
    assert "[system:s][user:q][developer:d]>" == rendered("{# developer #}" + PLAIN, messages)


@pytest.mark.parametrize(
    ("source", "text"),
    [(PLAIN, "[user:q][assistant:so "), (TRIMMING, "[q][so")],
)
def test_continued_message_stays_open(source: str, text: str) -> None:
    """The prompt ends with the final message; its last spaces go where the template strips them."""
    messages = [says("q"), says("so ", "assistant")]

    assert text == rendered(source, messages, add_generation_prompt=False, continue_final_message=True)


def test_continued_message_of_parts_ends_after_its_last_text() -> None:
    """Where content is a list, the prompt ends with the last part that has text; without one nothing continues."""
    source = "{% for m in messages %}{% for p in m.content %}({{ p.text or p.name }}){% endfor %}{% endfor %}"
    reference = {"type": "tool_reference", "name": "f"}
    flags = {"add_generation_prompt": False, "continue_final_message": True}

    assert "(q)(a)(b" == rendered(source, [says("q"), says(["a", "b", reference], "assistant")], **flags)
    with pytest.raises(Fault) as caught:
        rendered(source, [says([reference], "assistant")], **flags)

    assert "continue_final_message" == caught.value.param


def test_final_message_that_the_template_drops_cannot_be_continued() -> None:
    """There is nothing to continue where the template does not print the final message."""
    with pytest.raises(Fault) as caught:
        rendered("{{ messages[0].content }}", [says("q"), says("a", "assistant")], continue_final_message=True)

    assert "continue_final_message" == caught.value.param


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"a": "\\u00e9 <b>"}', '{"a": "é <b>"}'),
        ("{bad", "{}"),
        ("[1]", "{}"),
        ("", "{}"),
        (None, "{}"),
        ({"a": 1.0}, '{"a": 1.0}'),
        ('{"n": 18446744073709551617}', '{"n": 18446744073709551617}'),
    ],
)
def test_tool_arguments_become_an_object(arguments: Any, text: str) -> None:
    """Arguments are parsed; what is not an object becomes an empty one, so that the chat can go on."""
    source = "{% for m in messages %}{{ m.tool_calls[0].function.arguments | tojson }}{% endfor %}"
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}

    assert text == rendered(source, [says("", "assistant", tool_calls=[call])])


def test_reasoning_reaches_the_template_under_both_names() -> None:
    """`reasoning` and the older `reasoning_content` are one field; a null one is absent."""
    source = "{% for m in messages %}{{ m.reasoning }}/{{ m.reasoning_content }}{% endfor %}"

    assert "r/r" == rendered(source, [says("a", "assistant", reasoning_content="r")])
    assert "n/n" == rendered(source, [says("a", "assistant", reasoning="n", reasoning_content="r")])
    assert "/" == rendered(source, [says("a", "assistant", reasoning=None)])


def test_tools_are_printed_in_the_order_of_the_engines_model() -> None:
    """Absent description and parameters are null, unknown keys go, `strict` and `defer_loading` stay where given."""
    tool = {"x": 1, "function": {"strict": True, "y": 2, "name": "f"}, "type": "function"}
    deferred = {"function": {"name": "g", "description": "d", "parameters": {"b": 1, "a": 2}}, "defer_loading": True}
    source = "{% for t in tools %}{{ t | tojson }}\n{% endfor %}"
    expected = (
        '{"type": "function", "function": {"name": "f", "description": null, "parameters": null, "strict": true}}\n'
        '{"type": "function", "function": {"name": "g", "description": "d", "parameters": {"b": 1, "a": 2}, '
        '"defer_loading": true}, "defer_loading": true}\n'
    )

    assert expected == rendered(source, [says("q")], tools=tools_as_rendered([tool, deferred]))


def test_variables_reach_the_template_if_it_names_them() -> None:
    """A request's variables may replace special tokens, and none may replace the messages."""
    source = "{{ bos_token }}{{ date_string }}" + PLAIN
    variables = {"bos_token": "Z", "date_string": "1 Jan", "other": "x", "messages": [], "self": 1}

    assert "<s>[user:q]>" == rendered(source, [says("q")])
    assert "Z1 Jan[user:q]>" == rendered(source, [says("q")], variables=variables)


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no') }}",
        "{{ messages[9].content }}",
        "{{ messages[0].content + 1 }}",
        "{{ ''.__class__.__mro__ }}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{{ messages.append(1) }}",
    ],
)
def test_whatever_a_template_raises_is_malformed(source: str) -> None:
    """Errors of the template, of its expressions and of the sandbox are the client's 400."""
    with pytest.raises(Fault) as caught:
        rendered(source, [says("q")])

    assert Reason.MALFORMED_REQUEST is caught.value.reason


@pytest.mark.parametrize(
    "source",
    [
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ '{0[0].__class__}'.format_map({'0': messages}) }}",
        "{{ ('{0.__class__}' | attr('format'))(messages) }}",
        "{{ ''.join.__self__.__class__.__base__ }}",
        "{% set ns = namespace(a=1) %}{{ ns.__class__.__init__.__globals__ }}",
        "{{ namespace.__init__.__globals__ }}",
        "{% for m in messages %}{{ loop.__init__.__globals__ }}{% endfor %}",
        "{% for m in messages %}{{ loop._iterable }}{% endfor %}",
        "{{ messages[0].keys.__self__.__class__.__base__ }}",
        "{{ messages[0].update(a=1) }}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    """No attribute leads out of what a template was given, by the short ways neither: it is refused or undefined."""
    text = ""
    with contextlib.suppress(Fault):
        text = rendered(source, [says("q")])

    assert "" == text


def test_methods_of_text_and_namespaces_work() -> None:
    """The short ways give what the sandbox's own way gives."""
    source = (
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + loop.index %}{% endfor %}"
        "{{ ns.n }}{{ ns.absent }}{{ 'a,b'.split(',')[1] }}{{ 'x={}'.format(1) }}{{ ' q '.strip() }}{{ ''.absent }}"
    )

    assert "3bx=1q" == rendered(source, [says("q"), says("r")])


def test_generation_and_loop_control_tags_are_known() -> None:
    """Templates may mark assistant text and leave loops early."""
    source = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}"

    assert "a" == rendered(source, [says("a"), says("b")])


def test_clock_of_the_template_is_live() -> None:
    """`strftime_now` formats the current local time."""
    assert rendered("{{ strftime_now('%Y') }}", [says("q")]).isdigit()
