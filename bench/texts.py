"""Texts to count: English, code and Chinese, in chats of any size.

English is the reference that CPython carries for its own help(), code is this project's own. Chinese is made: common
words in an order drawn from a fixed seed, which tokenizers cut as they cut prose.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics

import extproc

TURN_BYTES = 4096
"""Messages of chats are of this size, or of all that is wanted where that is less."""

_CHINESE_BYTES = 2**20

_WORDS = (  # noqa: SIM905 (a list would take a hundred lines)
    "我们 可以 一个 没有 他们 自己 问题 工作 时间 知道 现在 因为 如果 已经 什么 这个 那个 所以 "
    "但是 还是 需要 开始 进行 发展 社会 经济 国家 系统 数据 模型 计算 方法 结果 研究 技术 信息 "
    "服务 请求 响应 用户 管理 网络 程序 语言 文本 长度 学习 训练 测试 分析 设计 实现 使用 提供 "
    "支持 处理 存储 内存 显卡 速度 性能 不同 主要 重要 可能 应该 必须 大家 今天 明天 世界 生活 "
    "朋友 孩子 老师 学生 城市 公司 产品 市场 价格 安全 健康 天气 音乐 电影 故事 历史 文化 的 "
    "是 在 了 和 有 也 就 都 而 与 对 为 从 到 把 被 让 更 "
    "最 很 不"
).split()
_MARKS = "\uff0c\uff0c\u3002\u3002\uff1b\uff1f\uff1a"
"""Fullwidth comma, full stop, semicolon, question mark and colon, the usual ones twice."""


@cache
def corpora() -> Mapping[str, bytes]:
    """UTF-8 by kind, some hundred KB of each."""
    package = Path(extproc.__file__).parent
    return {
        "English": " ".join(topics.values()).encode(),
        "code": b"\n".join(path.read_bytes() for path in sorted(package.rglob("*.py"))),
        "Chinese": "".join(_chinese()).encode(),
    }


def _chinese() -> Iterator[str]:
    rng = random.Random(20260101)
    size = 0
    while size < _CHINESE_BYTES:
        clause = "".join(rng.choices(_WORDS, k=rng.randint(3, 9))) + rng.choice(_MARKS)
        size += len(clause.encode())
        yield clause


def cut(kind: str, start: int, size: int) -> str:
    """About `size` bytes of a corpus, beginning at `start`; both wrap around its end."""
    corpus = corpora()[kind]
    start %= len(corpus)
    found = corpus[start : start + size]
    while len(found) < size:
        found += corpus[: size - len(found)]
    return found.decode(errors="ignore")  # characters that are cut in two


def messages(kind: str, start: int, size: int) -> list[dict[str, str]]:
    """A conversation with `size` bytes of text."""
    return [
        {"role": "assistant" if turn % 2 else "user", "content": cut(kind, start + at, min(TURN_BYTES, size - at))}
        for turn, at in enumerate(range(0, size, TURN_BYTES))
    ]


def body(model: str, conversation: list[dict[str, str]]) -> bytes:
    """A chat request as the SDKs write it: no spaces, no escapes."""
    document = {"model": model, "messages": conversation, "max_tokens": 16}
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()
