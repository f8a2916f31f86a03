"""How many tokens a request may take, before the LLM service has counted them."""

from typing import Final

from chiasm.v1 import llm_service_pb2

# English has about four bytes a token. What was taken in truth is counted when the answer ends.
_BYTES_A_TOKEN: Final = 4
_TOKENS_A_PICTURE: Final = 256
_TOKENS_AN_ANSWER: Final = 256  # where the request names no bound


def expected_tokens(request: llm_service_pb2.GenerateRequest) -> int:
    """Tokens of the prompt and of all its answers, guessed: nothing is tokenized or encoded."""
    pictures = sum(
        part.WhichOneof("content") != "text"
        for message in request.messages
        for part in message.parts
    )
    # Pictures lie beside the message, not in it; tools and forms are part of the prompt.
    prompt = len(request.prompt.token_ids.ids) or request.ByteSize() // _BYTES_A_TOKEN
    sampling = request.sampling
    bounded = sampling.HasField("max_token_count")
    answer = sampling.max_token_count if bounded else _TOKENS_AN_ANSWER
    return prompt + pictures * _TOKENS_A_PICTURE + answer * max(1, sampling.choice_count)
