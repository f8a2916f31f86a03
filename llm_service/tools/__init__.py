"""Tool calls: what a request offers, the grammar that an answer then keeps, and the calls in it.

offered  the message to checked tools       grammar  tools to a grammar's text
hermes   an answer's text to its calls

The form is that of the Hermes models, which Qwen's take too
(https://github.com/NousResearch/Hermes-Function-Calling): text, and for each call

    <tool_call>
    {"name": "weather", "arguments": {"city": "Oslo"}}
    </tool_call>

Whatever the model would do alone, the grammar holds it to that form from `<tool_call>` on, so that
a call names an offered function and its arguments are JSON of that function's schema.
"""
