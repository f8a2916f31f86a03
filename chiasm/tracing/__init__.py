"""Traces: W3C context through the processes, and spans by OpenTelemetry where they are wanted.

    w3c        the headers `traceparent` and `tracestate`: what is accepted, what is sent on
    spans      what the code calls: the span of a request, spans of its stages
    names      names of spans and attributes
    metrics    counts of spans sent and lost
    settings   the flags `--trace-endpoint` and `--trace-ratio`
    export     OpenTelemetry: makes spans, sends them to a collector

Only `export` imports OpenTelemetry, and only a process with `--trace-endpoint` imports `export`.
"""
