"""The messages that rowmill's services and its users exchange, and the broker topology they travel over.

Imports nothing else of rowmill, so that anyone can read what is on the wire from this package alone. Messages are frozen msgspec structs
(strict types, unknown fields ignored); what people write is pydantic, and lives elsewhere.
"""
