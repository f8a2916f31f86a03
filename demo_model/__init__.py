"""A tiny vision-language model that answers questions about pictures, and what trained it."""
