"""A small server on PyPI mcp 2: server_mcp2.py PORT http|json|sse.

http speaks both eras and keeps sessions, json keeps none and answers in
JSON, sse is the older HTTP+SSE.
"""
import sys

from mcp.server.mcpserver import MCPServer

server = MCPServer('small')


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def shout(text: str) -> str:
    """Say it louder."""
    return text.upper() + '!'


if __name__ == '__main__':
    port, mode = int(sys.argv[1]), sys.argv[2]
    if mode == 'sse':
        server.run('sse', port=port)
    else:
        server.run('streamable-http', port=port,
                   json_response=mode == 'json',
                   stateless_http=mode == 'json')
