"""Finding or starting the two servers that rowmill needs: a RabbitMQ and a Postgres, for development, demos and tests.

Owns server processes and their folders, nothing of what is stored in them. `private_servers` is a pair of one's own in any folder, which
tests stop, restart and kill.
"""

from rowmill.dev.nodes import BrokerNode, DatabaseNode, ServerSet
from rowmill.dev.private import private_servers

__all__ = ["BrokerNode", "DatabaseNode", "ServerSet", "private_servers"]
