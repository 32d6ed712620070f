// A small server on npm @modelcontextprotocol/server 2, which speaks both
// eras over HTTP: node server_ts.mjs PORT [reject], the latter only the new.
import { createServer } from 'node:http';
import { createRequire } from 'node:module';
import { pathToFileURL } from 'node:url';

// Packages are looked for where the process was started, not beside this.
const require = createRequire(process.cwd() + '/');
const { McpServer, createMcpHandler } = await import(
    pathToFileURL(require.resolve('@modelcontextprotocol/server')));

const handler = createMcpHandler(() => {
    const server = new McpServer({ name: 'small', version: '1' });
    server.registerTool('ping', { description: 'Say pong.' },
        async () => ({ content: [{ type: 'text', text: 'pong' }] }));
    return server;
}, { legacy: process.argv[3] === 'reject' ? 'reject' : 'stateless' });

createServer(async (request, response) => {
    const chunks = [];
    for await (const chunk of request) chunks.push(chunk);
    const reply = await handler.fetch(new Request(
        `http://127.0.0.1${request.url}`, {
            method: request.method, headers: request.headers,
            body: chunks.length ? Buffer.concat(chunks) : undefined,
        }));
    response.writeHead(reply.status, Object.fromEntries(reply.headers));
    for await (const chunk of reply.body ?? []) response.write(chunk);
    response.end();
}).listen(Number(process.argv[2]), '127.0.0.1');
