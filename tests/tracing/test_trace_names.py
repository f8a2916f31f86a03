"""The pinned names against those that OpenTelemetry publishes for Python."""

from opentelemetry.semconv._incubating.attributes import gen_ai_attributes, rpc_attributes
from opentelemetry.semconv.attributes import (
    error_attributes,
    http_attributes,
    server_attributes,
    service_attributes,
)

from chiasm.tracing import names

_CONVENTIONS = (
    gen_ai_attributes,
    rpc_attributes,
    error_attributes,
    http_attributes,
    server_attributes,
    service_attributes,
)


def _texts(module: object) -> set[str]:
    return {value for value in vars(module).values() if isinstance(value, str)}


def test_every_dotted_name_is_the_conventions_or_begins_with_ours() -> None:
    published = set[str]().union(*map(_texts, _CONVENTIONS))
    # Values and spans have no dot.
    attributes = {value for name, value in vars(names).items() if name.isupper() and "." in value}
    assert len(attributes) > 30
    assert {one for one in attributes if not one.startswith("chiasm.")} <= published
