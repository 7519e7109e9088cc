"""Chat prompts: the model's own template through llama-cpp-python, or plain ChatML."""

from __future__ import annotations

from typing import Any

from ..errors import ModelError
from .engine import Engine

_EMPTY_THOUGHT = "<think>\n\n</think>\n\n"


def chatml(prompt: str, *, think: bool = True) -> str:
    """One user turn in ChatML, open for the assistant; `think=False` closes the thought before it begins."""
    text = f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
    return text if think else text + _EMPTY_THOUGHT


def apply_template(engine: Engine, prompt: str, *, think: bool = True) -> str:
    """One user turn in the template that the GGUF carries (`tokenizer.chat_template`).

    `think=False` is passed to the template as `enable_thinking`. Raises ModelError where there is no template
    or it cannot be rendered.
    """
    from llama_cpp.llama_chat_format import Jinja2ChatFormatter

    template = engine.file.keys.get("tokenizer.chat_template")
    if not isinstance(template, str) or not template:
        raise ModelError(f"{engine.path}: no chat template in the file: use --chatml, or a plain prompt")
    try:
        formatter = Jinja2ChatFormatter(
            template=template, eos_token=engine.special_text("eos"), bos_token=engine.special_text("bos")
        )
        settings: dict[str, Any] = {} if think else {"enable_thinking": False}
        text = str(formatter(messages=[{"role": "user", "content": prompt}], **settings).prompt)
    except Exception as e:  # the template is code from the file: it may raise anything
        raise ModelError(f"{engine.path}: its chat template fails ({type(e).__name__}: {e}); use --chatml") from None
    # The tokenizer adds BOS by itself.
    bos = engine.special_text("bos")
    return text[len(bos) :] if bos and engine.adds_bos and text.startswith(bos) else text
