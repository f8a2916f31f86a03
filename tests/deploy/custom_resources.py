"""Schemas of the custom resources that the manifests use: only the fields in use, and no others.

They are narrower than the resources' own, which are in no package that the tests could install: a
field that is not here was not yet compared with the resource's documentation.
"""

from typing import Any, Final

Schema = dict[str, Any]

_TEXT: Final[Schema] = {"type": "string", "minLength": 1}
_NUMBER: Final[Schema] = {"type": "integer", "minimum": 1}
# As Go writes durations, and as the Gateway API does.
_DURATION: Final[Schema] = {"type": "string", "pattern": r"^\d+(h|m|s)$"}


def _exact(required: Schema, optional: Schema | None = None) -> Schema:
    return {
        "type": "object",
        "properties": required | (optional or {}),
        "required": sorted(required),
        "additionalProperties": False,
    }


def _list(item: Schema) -> Schema:
    return {"type": "array", "minItems": 1, "items": item}


def _resource(version: str, kind: str, spec: Schema) -> Schema:
    labels = {"type": "object", "additionalProperties": _TEXT}
    metadata = _exact({"name": _TEXT}, {"namespace": _TEXT, "labels": labels})
    return _exact(
        {
            "apiVersion": {"const": version},
            "kind": {"const": kind},
            "metadata": metadata,
            "spec": spec,
        }
    )


_ISSUER: Final = _resource(
    "cert-manager.io/v1",
    "Issuer",
    {
        "oneOf": [
            _exact({"selfSigned": {"type": "object", "additionalProperties": False}}),
            _exact({"ca": _exact({"secretName": _TEXT})}),
        ]
    },
)
_CERTIFICATE: Final = _resource(
    "cert-manager.io/v1",
    "Certificate",
    _exact(
        {
            "secretName": _TEXT,
            "duration": _DURATION,
            "privateKey": _exact(
                {
                    "algorithm": {"enum": ["ECDSA"]},
                    "size": {"enum": [256, 384, 521]},
                    "rotationPolicy": {"enum": ["Always", "Never"]},
                }
            ),
            "issuerRef": _exact(
                {"name": _TEXT, "kind": {"const": "Issuer"}, "group": {"const": "cert-manager.io"}}
            ),
        },
        {
            "isCA": {"type": "boolean"},
            "commonName": _TEXT,
            "dnsNames": _list(_TEXT),
            "usages": _list({"enum": ["server auth", "client auth"]}),
            "renewBefore": _DURATION,
        },
    ),
)
_POD_MONITOR: Final = _resource(
    "monitoring.coreos.com/v1",
    "PodMonitor",
    _exact(
        {
            "selector": _exact({"matchLabels": {"type": "object"}}),
            "podMetricsEndpoints": _list(
                _exact(
                    {
                        "port": _TEXT,
                        "path": _TEXT,
                        "interval": _DURATION,
                        "relabelings": _list(
                            _exact(
                                {
                                    "action": {"const": "replace"},
                                    "targetLabel": _TEXT,
                                    "replacement": _TEXT,
                                }
                            )
                        ),
                    }
                )
            ),
        }
    ),
)
_RULE: Final = _exact(
    {"expr": _TEXT},
    {
        "alert": _TEXT,
        "record": _TEXT,
        "for": _DURATION,
        "keep_firing_for": _DURATION,
        "labels": {"type": "object", "additionalProperties": _TEXT},
        "annotations": {"type": "object", "additionalProperties": _TEXT},
    },
)
_PROMETHEUS_RULE: Final = _resource(
    "monitoring.coreos.com/v1",
    "PrometheusRule",
    _exact(
        {"groups": _list(_exact({"name": _TEXT, "rules": _list(_RULE)}, {"interval": _DURATION}))}
    ),
)
_HTTP_ROUTE: Final = _resource(
    "gateway.networking.k8s.io/v1",
    "HTTPRoute",
    _exact(
        {
            "parentRefs": _list(
                _exact({"group": _TEXT, "kind": _TEXT, "name": _TEXT, "namespace": _TEXT})
            ),
            "hostnames": _list(_TEXT),
            "rules": _list(
                _exact(
                    {
                        # Eight is what the first version of the resource allows.
                        "matches": _list(
                            _exact(
                                {
                                    "path": _exact(
                                        {
                                            "type": {"enum": ["Exact", "PathPrefix"]},
                                            "value": {"type": "string", "pattern": "^/"},
                                        }
                                    )
                                }
                            )
                        )
                        | {"maxItems": 8},
                        "timeouts": _exact({"request": _DURATION, "backendRequest": _DURATION}),
                        "backendRefs": _list(
                            _exact(
                                {
                                    "group": {"const": ""},
                                    "kind": {"const": "Service"},
                                    "name": _TEXT,
                                    "port": _NUMBER,
                                    "weight": _NUMBER,
                                }
                            )
                        ),
                    }
                )
            ),
        }
    ),
)

SCHEMAS: Final[dict[str, Schema]] = {
    "Issuer": _ISSUER,
    "Certificate": _CERTIFICATE,
    "PodMonitor": _POD_MONITOR,
    "PrometheusRule": _PROMETHEUS_RULE,
    "HTTPRoute": _HTTP_ROUTE,
}
