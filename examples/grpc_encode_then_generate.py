"""Over gRPC: have an encoder service encode a picture, hand its features to the LLM service.

.venv/bin/python examples/grpc_encode_then_generate.py --encoder HOST:PORT --llm HOST:PORT FILE
"""

import argparse
from pathlib import Path

from chiasm.client import Client
from chiasm.conversation import GREEDY, user


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--llm", default="127.0.0.1:50051")
    parser.add_argument("--encoder", default="127.0.0.1:50061")
    parser.add_argument("picture", type=Path)
    arguments = parser.parse_args()
    with Client(llm=arguments.llm, encoder=arguments.encoder) as client:
        encoded = client.encode(arguments.picture)
        print(f"encoded by {encoded.encoder_name}: {encoded.features.shape}, {encoded.source}")
        answer = client.generate([user(encoded, "What shape is this?")], GREEDY)
        print(answer.text)
        # Or hold it at the LLM service, and send its name from then on.
        reference = client.hold(encoded)
        print(client.generate([user(reference, "What color is it?")], GREEDY).text)


if __name__ == "__main__":
    main()
