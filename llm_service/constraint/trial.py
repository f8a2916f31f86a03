"""`python -m llm_service.constraint.trial`: compiles grammars where a bad one can do no harm.

The library bounds its work by counts, not by time, and some grammars overflow its stack, which no
Python can catch. So each is compiled here first, with little memory; whoever waits kills this
process when it takes too long.

Writes an empty line once it is up. Then reads a JSON text a line, the grammar, and writes a JSON
text a line, what is wrong with it or "". Ends when its input does.
"""

import json
import random
import resource
import sys
import threading
from collections.abc import Callable
from typing import Final

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from llm_service.constraint.limits import parser_limits

# Half of what the service itself compiles and masks with: what fits here fits there.
COMPILE_STACK: Final = 32 << 20
_MASK_STACK: Final = 4 << 20
_STEPS: Final = 32
_END: Final = 256


class _Bytes:
    """A vocabulary of single bytes: small, and as good to find out whether a grammar compiles."""

    bos_token_id = None
    eos_token_id = _END
    special_token_ids: Final = (_END,)
    tokens: Final = (*(bytes([byte]) for byte in range(256)), b"</s>")

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


def main() -> None:
    _limit_memory(int(sys.argv[1]))
    tokenizer = LLTokenizer(TokenizerWrapper(_Bytes()))
    print(flush=True)
    for line in sys.stdin:
        fault = fault_of(json.loads(line), tokenizer)
        print(json.dumps(fault), flush=True)


def fault_of(grammar: str, tokenizer: LLTokenizer) -> str:
    """What the library says against `grammar`; "" if it compiles and its masks can be computed."""
    root = _on_stack(COMPILE_STACK, lambda: _compiled(grammar, tokenizer))
    if root.is_error():
        return root.get_error()
    return _on_stack(_MASK_STACK, lambda: _walked(root.deep_copy())).get_error()


def _compiled(grammar: str, tokenizer: LLTokenizer) -> LLMatcher:
    return LLMatcher(tokenizer, grammar, log_level=0, limits=parser_limits())


def _walked(matcher: LLMatcher) -> LLMatcher:
    """`matcher` after some random text that it allows."""
    dice = random.Random(0)
    for _ in range(_STEPS):
        if matcher.is_stopped():
            break
        mask = matcher.compute_bitmask()
        allowed = [byte for byte in range(_END) if mask[byte >> 3] >> (byte & 7) & 1]
        if matcher.is_error() or not allowed:
            break
        matcher.consume_token(dice.choice(allowed))
    return matcher


def _on_stack(size: int, work: Callable[[], LLMatcher]) -> LLMatcher:
    done: list[LLMatcher] = []
    threading.stack_size(size)
    thread = threading.Thread(target=lambda: done.append(work()))
    thread.start()
    thread.join()
    return done[0]


def _limit_memory(most: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    main()
