"""A small server on PyPI mcp 1: server_mcp1.py PORT http|json|sse.

http keeps sessions, json keeps none and answers in JSON, sse is the older
HTTP+SSE.
"""
import sys

from mcp.server.fastmcp import FastMCP

port, mode = int(sys.argv[1]), sys.argv[2]
server = FastMCP('small', port=port, json_response=mode == 'json',
                 stateless_http=mode == 'json')


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def shout(text: str) -> str:
    """Say it louder."""
    return text.upper() + '!'


if __name__ == '__main__':
    server.run('sse' if mode == 'sse' else 'streamable-http')
