"""OpenAI's Responses without state: a request becomes a chat, an answer becomes items."""
