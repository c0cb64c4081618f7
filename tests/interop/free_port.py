"""A port of the loopback interface for a run's first rank."""

import socket

HELD = []  # sockets whose ports nobody else is given; who sets SO_REUSEADDR, as a TCPStore does, may still listen there


def free_port():
    HELD.append(socket.socket())
    HELD[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    HELD[-1].bind(("127.0.0.1", 0))
    return str(HELD[-1].getsockname()[1])
