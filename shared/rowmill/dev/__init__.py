"""Finding or starting the two servers that rowmill needs: a RabbitMQ and a Postgres, for development, demos and tests.

Owns server processes and their folders, nothing of what is stored in them. `Servers` is a project's set (given URLs, else Docker Compose,
else private nodes); `private_servers` is a pair of one's own in any folder, which tests stop, restart and kill.
"""

from rowmill.dev.nodes import BrokerNode, DatabaseNode, ServerSet
from rowmill.dev.private import private_servers
from rowmill.dev.servers import Servers

__all__ = ["BrokerNode", "DatabaseNode", "ServerSet", "Servers", "private_servers"]
