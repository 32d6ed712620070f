"""A small server on PyPI fastmcp, which lists in pages of two tools:
server_fastmcp.py PORT http|sse."""
import sys

from fastmcp import FastMCP

server = FastMCP('small', list_page_size=2)

for name in 'abcde':
    def tool(text: str) -> str:
        """Give the text back."""
        return text
    server.tool(tool, name=name)


if __name__ == '__main__':
    server.run(transport=sys.argv[2], host='127.0.0.1',
               port=int(sys.argv[1]), show_banner=False)
