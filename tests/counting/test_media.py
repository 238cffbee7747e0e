"""Media parts: charged as the policy declares, by what the body shows of them, and never read as text."""

from __future__ import annotations

import base64
import io
import json
import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from extproc.core.policy import Endpoint
from extproc.core.values import Fault, Reason
from extproc.counting import Counter
from extproc.counting.media import PARTS_MAX, _pixels
from tests.counting.models import CHAT, QWEN3, counted, outcome, policy, user

MEDIA = {
    "image": {"tokens": 5, "tokens_max": 2000, "patch_side_pixels": 28},
    "audio": {"tokens": 10, "tokens_max": 900, "tokens_per_kib": 3},
    "video": {"tokens": 3000},
    "file": {"tokens": 20, "tokens_max": 4000, "tokens_per_kib": 100},
}
VISION = """{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content -%}
{%- if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>
{%- elif part.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>
{%- elif 'text' in part %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}"""
"""Prints parts as the templates of Qwen's vision models do."""

RESPONSES, MESSAGES, BATCH, EMBEDDINGS = (
    Endpoint.RESPONSES,
    Endpoint.MESSAGES,
    Endpoint.CHAT_COMPLETIONS_BATCH,
    Endpoint.EMBEDDINGS,
)


def _encoded(content: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(content).decode()}"


def _image(width: int, height: int, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height)).save(file, kind, **({"lossless": True} if kind == "WEBP" else {}))
    return file.getvalue()


PNG = _encoded(_image(56, 30))  # 2 x 2 patches: 9 tokens
RECORDING = base64.b64encode(bytes(1500)).decode()  # 2 KiB begun: 16 tokens

URL = "https://images.example.invalid/quay.jpg"


def image_url(url: object, **options: Any) -> dict[str, Any]:
    """An image as chats have it."""
    return {"type": "image_url", "image_url": {"url": url, **options}}


def input_audio(data: object = RECORDING, audio_format: object = "wav") -> dict[str, Any]:
    """A recording as chats have it."""
    return {"type": "input_audio", "input_audio": {"data": data, "format": audio_format}}


def said(*parts: Mapping[str, Any], model: str = "string") -> dict[str, Any]:
    """A chat of one message with `parts`."""
    return {"model": model, "max_tokens": 5, "messages": [{"role": "user", "content": list(parts)}]}


def text(value: str) -> dict[str, Any]:
    """A part of text."""
    return {"type": "text", "text": value}


@pytest.fixture(scope="module")
def media(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Counter]:
    """Models `string` and `parts` by the template, `sglang` and `sglang-parts`, and `none` without a charge."""
    directory = tmp_path_factory.mktemp("vision")
    for path in QWEN3.iterdir():
        (directory / path.name).symlink_to(path)
    (directory / "chat_template.jinja").write_text(VISION)
    vision = {"tokenizer_dir": directory, "media": MEDIA}
    models: dict[str, dict[str, Any]] = {
        "string": {"media": MEDIA},
        "parts": vision,
        "sglang": {"media": MEDIA, "engine": "sglang"},
        "sglang-parts": {**vision, "engine": "sglang"},
        "none": {},
    }
    found = Counter(policy(models, default_model="none", endpoints=list(Endpoint)))
    yield found
    found.close()


PARTS = [
    (image_url(PNG), 9),
    (image_url(PNG, detail="low"), 9),
    (image_url(URL), 2000),
    (image_url(PNG.replace("data:image/png", "DATA:")), 9),
    (image_url(_encoded(b"GIF89a" + bytes(20), "image/gif")), 2000),
    (input_audio(), 16),
    ({"type": "audio_url", "audio_url": {"url": f"data:audio/mpeg;base64,{RECORDING}"}}, 16),
    ({"type": "audio_url", "audio_url": {"url": "http://h/x.mp3"}}, 900),
    ({"type": "video_url", "video_url": {"url": URL}}, 3000),
    ({"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{RECORDING}"}}, 3000),
]
VLLM_PARTS = [
    ({"type": "input_image", "image_url": PNG, "detail": "auto"}, 9),
    ({"type": "file", "file": {"file_data": f"data:application/pdf;base64,{RECORDING}", "filename": "x"}}, 220),
]


@pytest.mark.parametrize(
    ("model", "part", "charge"),
    [(model, *case) for model in ("string", "sglang") for case in PARTS] + [("string", *case) for case in VLLM_PARTS],
)
def test_charge(media: Counter, model: str, part: dict[str, Any], charge: int) -> None:
    """A part costs its declared charge beside the text, whose content is one string, and marks the count."""
    found = counted(media, said(text("Describe it."), part, model=model))
    plain = counted(media, said(text(". Describe it."), model=model))

    assert plain.demand.input_tokens + charge == found.demand.input_tokens
    assert (False, True) == (plain.demand.inexact, found.demand.inexact)


@pytest.mark.parametrize(
    ("model", "part", "printed"),
    [
        ("parts", image_url(PNG), 3 + 9),
        ("parts", {"type": "video_url", "video_url": {"url": URL}}, 3 + 3000),
        ("parts", input_audio(), 16),
        ("sglang-parts", image_url(PNG), 3 + 9),
        ("sglang-parts", input_audio(), 16),
    ],
)
def test_a_template_prints_its_placeholder(media: Counter, model: str, part: dict[str, Any], printed: int) -> None:
    """A template that loops over parts gets the part's kind, and what it prints for that is counted besides."""
    found = counted(media, said(part, text("Describe it."), model=model))
    plain = counted(media, said(text("Describe it."), model=model))

    assert plain.demand.input_tokens + printed == found.demand.input_tokens


@pytest.mark.parametrize("model", ["string", "parts"])
def test_every_part_of_every_prompt_is_charged(media: Counter, model: str) -> None:
    """Charges add up within a prompt, and each prompt of a batch has its own."""
    message = {"role": "user", "content": [text("a"), image_url(URL), image_url(PNG)]}
    plain = {"role": "user", "content": "a"}
    body = {"model": model, "max_tokens": 5, "messages": [[plain], [message, message]]}
    found = counted(media, body, BATCH)

    assert found.prompts_tokens[0] < 20
    assert 2 * 2009 < found.prompts_tokens[1] < 2 * 2009 + 60
    assert sum(found.prompts_tokens) == found.demand.input_tokens


@pytest.mark.parametrize(
    ("endpoint", "fields"),
    [
        (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": PNG}]}]}),
        (EMBEDDINGS, {"messages": [{"role": "user", "content": [image_url(PNG)]}]}),
    ],
)
def test_other_chats_are_charged(media: Counter, endpoint: Endpoint, fields: dict[str, Any]) -> None:
    """Whatever becomes a chat is charged as one."""
    found = counted(media, {"model": "string", **fields}, endpoint)

    assert (True, True) == (found.demand.inexact, 9 < found.demand.input_tokens < 30)


def test_images_of_messages(media: Counter) -> None:
    """Images of Anthropic's messages are parts of the turn; those of a tool's result are the user's, after it."""
    content = PNG.partition(",")[2]
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": content}}
    linked = {"type": "image", "source": {"type": "url", "url": URL}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [text("seen"), image]}

    def found(blocks: list[dict[str, Any]], endpoint: Endpoint = MESSAGES) -> int:
        body = {"model": "string", "max_tokens": 5, "messages": [{"role": "user", "content": blocks}]}
        return counted(media, body, endpoint).demand.input_tokens

    def chat(*messages: dict[str, Any]) -> int:
        return counted(media, {"model": "string", "messages": list(messages)}).demand.input_tokens

    assert chat({"role": "user", "content": [text("a"), image_url(PNG)]}) == found([text("a"), image])
    assert chat({"role": "user", "content": [image_url(URL)]}) == found([linked])
    assert found([linked]) == found([linked], Endpoint.COUNT_TOKENS)
    tool = {"role": "tool", "tool_call_id": "t", "content": "seen"}
    assert chat(tool, {"role": "user", "content": [image_url(PNG)]}) == found([result])


BAD_PARTS = [
    (image_url("ftp://h/quay.png"), "messages.content.image_url.url"),
    (image_url("/etc/passwd"), "messages.content.image_url.url"),
    (image_url("https:///x"), "messages.content.image_url.url"),
    (image_url(""), "messages.content.image_url.url"),
    (image_url(None), "messages.content.image_url.url"),
    (image_url(PNG.partition(",")[2]), "messages.content.image_url.url"),
    (image_url("data:image/png,abcd"), "messages.content.image_url.url"),
    (image_url("data:image/png;charset=x;base64,AAAA"), "messages.content.image_url.url"),
    (image_url("data:image/png;base64,"), "messages.content.image_url.url"),
    (image_url("data:image/png;base64,AAA"), "messages.content.image_url.url"),
    (image_url("data:image/png;base64,AA==AAAA"), "messages.content.image_url.url"),
    (image_url("data:image/png;base64,AA\nAA"), "messages.content.image_url.url"),
    (image_url("data:image/png;base64,AA\u00c4A"), "messages.content.image_url.url"),
    (image_url("data:image/png;base64," + "A" * (2**16 - 2) + "==AAAA"), "messages.content.image_url.url"),
    (image_url(PNG, max_dynamic_patch=40), "messages.content.image_url"),
    ({"type": "image_url", "image_url": URL}, "messages.content.image_url"),
    ({"type": "image_url"}, "messages.content.image_url"),
    (input_audio(audio_format="wav;base64,AAAA"), "messages.content.input_audio.format"),
    (input_audio(""), "messages.content.input_audio.data"),
    (input_audio(audio_format=None), "messages.content.input_audio.format"),
    (input_audio("data:audio/wav;base64,AAAA"), "messages.content.input_audio.data"),
    ({"type": "image_embeds", "image_embeds": "AAAA"}, "messages.content.type"),
    ({"type": "x"}, "messages.content.type"),
    ({"type": ["image_url"]}, "messages.content.type"),
]


@pytest.mark.parametrize("model", ["string", "sglang"])
@pytest.mark.parametrize(("part", "param"), BAD_PARTS)
def test_what_no_charge_could_stand_for(media: Counter, model: str, part: dict[str, Any], param: str) -> None:
    """Content that engines would decode otherwise or read from elsewhere, and ready-made embeddings, are refused."""
    result = outcome(media, said(part, model=model))

    assert isinstance(result, Fault)
    assert (Reason.MALFORMED_REQUEST, param) == (result.reason, result.param)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (said(text("a") | {"uuid": "u", "image_url": URL}), "messages.content.uuid"),
        (said({"type": "file", "file": {"file_id": "f"}}), "messages.content.file.file_data"),
        (said({"type": "file", "file": {"file_data": "AAAA"}}, model="sglang"), "messages.content.type"),
        (said({"type": "input_image", "image_url": PNG}, model="sglang"), "messages.content.type"),
        (said(image_url(URL)) | {"truncate_prompt_tokens": 10}, "truncate_prompt_tokens"),
        (said(*[image_url(PNG)] * (PARTS_MAX + 1)), "messages.content"),
    ],
)
def test_refused(media: Counter, body: dict[str, Any], param: str) -> None:
    """Parts that an engine does not know, or knows from elsewhere, truncation, and parts without end are refused."""
    result = outcome(media, body)

    assert isinstance(result, Fault)
    assert (Reason.MALFORMED_REQUEST, param) == (result.reason, result.param)


@pytest.mark.parametrize("part", [part for part, _ in (*PARTS, *VLLM_PARTS)])
def test_without_a_charge_media_are_refused(media: Counter, part: dict[str, Any]) -> None:
    """A model whose policy declares no charge takes no media, and the answer says why."""
    result = outcome(media, said(text("Describe it."), part, model="none"))

    assert isinstance(result, Fault)
    assert (Reason.MALFORMED_REQUEST, "messages.content.type") == (result.reason, result.param)
    assert "declares no charge" in result.message


@pytest.mark.parametrize("model", ["string", "parts", "sglang"])
def test_a_megabyte_costs_its_charge(media: Counter, model: str) -> None:
    """What a recording costs is declared by its bytes, whatever its text would be, and no text of it is rendered."""
    recording = input_audio(base64.b64encode(os.urandom(2**20)).decode())
    draft = media.read(CHAT, json.dumps(said(recording, model=model)).encode())

    assert sum(map(len, draft.prompts.texts)) < 100
    assert 900 < media.count_now(draft).demand.input_tokens < 930


@pytest.mark.parametrize("model", ["string", "parts"])
def test_bounds_hold(media: Counter, model: str) -> None:
    """What is known before tokenizing bounds the count, charges included."""
    body = said(text("Describe it. " * 20), image_url(PNG), image_url(URL), model=model)
    draft = media.read(CHAT, json.dumps(body).encode())
    bounds, demand = draft.bounds(), media.count_now(draft).demand

    assert bounds is not None
    least, most = bounds
    assert 2009 < least.input_tokens <= demand.input_tokens <= most.input_tokens
    assert least.inexact
    assert most.inexact


def test_charges_count_against_the_context(media: Counter) -> None:
    """Media that leave no room in the context are refused without tokenizing."""
    with pytest.raises(Fault) as refused:
        media.read(CHAT, json.dumps(said(*[image_url(URL)] * 5)).encode())

    assert Reason.CONTEXT_LIMIT == refused.value.reason


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize(("width", "height"), [(1, 1), (17, 900), (1200, 3)])
def test_the_size_of_an_image(kind: str, width: int, height: int) -> None:
    """The header of each known format gives the size that the engines' own library reads."""
    assert (width, height) == _pixels(_image(width, height, kind))


def test_the_size_of_an_image_with_more_in_it() -> None:
    """Metadata, lossy and extended WebP, and JPEG's progressive frames do not hide the size."""
    image, exif = Image.new("RGB", (300, 200)), Image.Exif()
    exif[0x010E] = "x" * 5000
    for kind, options in (
        ("JPEG", {"exif": exif, "progressive": True}),
        ("WEBP", {"exif": exif}),
        ("WEBP", {"quality": 50}),
    ):
        file = io.BytesIO()
        image.save(file, kind, **options)
        assert (300, 200) == _pixels(file.getvalue())


NO_SIZE = [
    b"GIF89a" + struct.pack("<HH", 1, 1),
    b"\x89PNG\r\n\x1a\n" + bytes(40),
    _image(1, 1)[:20],
    _image(1, 1)[:33] + _image(9999, 1)[8:],  # a second header, which decoders obey
    _image(0x7FFF, 1).replace(struct.pack(">I", 0x7FFF), bytes(4)),
    b"\xff\xd8",
    b"\xff\xd8\xff\xda" + bytes(40),
    b"\xff\xd8" + b"\xff\xe0\x00\x02" * 1000,
    b"\xff\xd8" + b"\xff\xff" * 1000,
    b"RIFF" + bytes(40),
    b"RIFF0000WEBPVP8 " + bytes(40),
]


@pytest.mark.parametrize("content", NO_SIZE)
def test_a_size_that_cannot_be_trusted_is_none(content: bytes) -> None:
    """Other formats, cut and doubled headers leave the size unknown, which costs the most."""
    assert _pixels(content) is None


@given(st.sampled_from([b"", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"RIFF0000WEBPVP8"]), st.binary(max_size=80))
def test_no_bytes_break_the_reader(magic: bytes, rest: bytes) -> None:
    """Any bytes give a size of positive sides, or none."""
    found = _pixels(magic + rest)

    assert found is None or min(found) > 0


HANDED = {
    "48-chat-image-http-url.json": 2000,
    "49-chat-image-multi.json": 6 * (5 + 9),
    "50-chat-input-audio.json": 13,
    "51-chat-video-url.json": 3000,
    "52-chat-file-part.json": 120,
}


@pytest.mark.parametrize("name", HANDED)
def test_handed_bodies(media: Counter, shared: Path, name: str) -> None:
    """Recorded bodies with media are admitted with their own ceiling, by the declared charge and never by base64."""
    path = shared / "cases" / "bodies" / name
    expect = json.loads(path.with_suffix(".expect.json").read_bytes())
    body = json.loads(path.read_bytes()) | {"model": "string"}
    demand = counted(media, body).demand

    assert (expect["ceiling"]["per_sequence"], True) == (demand.max_output_tokens, demand.inexact)
    assert HANDED[name] < demand.input_tokens < HANDED[name] + 120


def test_text_is_not_charged(media: Counter) -> None:
    """A declared charge changes nothing for a chat of text."""
    with_charge, without = user("hi", model="string"), user("hi", model="none")

    assert counted(media, without).demand[1:] == counted(media, with_charge).demand[1:]


async def test_large_media_are_counted_apart() -> None:
    """3 MB of an image go to a worker process and come back with the charge."""
    counter = Counter(policy({"m": {"media": MEDIA}}, default_model="m"), processes=1)
    image = _encoded(_image(280, 280) + os.urandom(3 * 2**20))
    body = json.dumps(said(image_url(image), model="m")).encode()
    assert not counter.reads_quickly(body)
    try:
        found = await counter.count_apart(CHAT, body)
    finally:
        counter.close()

    assert (True, True) == (found.demand.inexact, 105 < found.demand.input_tokens < 120)
    assert found.body is None
