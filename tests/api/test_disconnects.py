"""Clients that leave, at any moment, and clients that never read: nothing is kept for them, nobody else notices."""

import asyncio
import random
import socket

import httpx2 as httpx
from dropping import Books, drop, encode, long_requests
from serving import Server
from traffic import Event, chat, client_of, counting, follow, native

NUM_DROPS, AT_A_TIME = 200, 16


def until_idle(server: Server, descriptors: int) -> Books:
    server.wait_for(lambda: (books := Books(server)).idle and books.descriptors == descriptors, "what clients held")
    return Books(server)


def test_connections_dropped_at_random_moments(server: Server) -> None:
    with server.client() as client:  # whatever is made on first use is made now
        for path, body in (native(counting(9), 3), chat(counting(9), 3)):
            assert client.post(path, json=body).status_code == 200
    staying = native(counting(7), 60)
    before = until_idle(server, Books(server).descriptors)
    chance = random.Random(1)
    kinds = long_requests()

    async def run() -> tuple[list[Event], list[list[Event]]]:
        gate = asyncio.Semaphore(AT_A_TIME)
        stayed: list[list[Event]] = []

        async def one(number: int) -> None:
            async with gate:
                await drop(server.port, kinds[number % len(kinds)], chance)

        async def stay(client: httpx.AsyncClient) -> None:
            while not dropping.done():
                stayed.append(await follow(client, *staying))

        async with client_of(server.url) as client:
            alone = await follow(client, *staying)
            dropping = asyncio.gather(*(one(number) for number in range(NUM_DROPS)))
            await asyncio.gather(stay(client), stay(client), dropping)
            return alone, stayed

    alone, stayed = asyncio.run(run())
    ids = [event["token"]["id"] for event in alone]
    assert len(ids) == 60
    assert stayed and all([event["token"]["id"] for event in events] == ids for events in stayed)
    after = until_idle(server, before.descriptors)
    assert after.dropped - before.dropped > NUM_DROPS / 2
    assert after.threads <= before.threads + 8  # workers that wait for long texts
    assert after.memory < before.memory + 64 * 2**20
    assert server.children()["engine"]


def test_a_drop_stops_the_work_for_it(server: Server) -> None:
    before = until_idle(server, Books(server).descriptors)
    new_tokens = 900

    async def run() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(encode(*native(counting(11), new_tokens)))
        await reader.readuntil(b'"index":3,')
        writer.transport.abort()

    asyncio.run(run())
    after = until_idle(server, before.descriptors)
    assert after.dropped == before.dropped + 1
    assert after.steps - before.steps < new_tokens / 4


def test_clients_that_never_read(server: Server) -> None:
    """Their answers end in the engine, and wait in the server; others are served; leaving frees the rest."""
    before = until_idle(server, Books(server).descriptors)
    deaf: list[socket.socket] = []
    try:
        # Streams, and answers that are larger than what the kernel keeps for a connection.
        asked = [native(counting(number), 60, top_n_tokens=5) for number in range(6)]
        asked += [("/tokenize", {"inputs": "a b " * 40_000})] * 2
        for path, body in asked:
            sock = socket.socket()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            sock.connect(("127.0.0.1", server.port))
            sock.sendall(encode(path, body))
            deaf.append(sock)
        with server.client() as client:
            answer = client.post("/generate", json=native(counting(7), 30)[1])
            assert answer.status_code == 200 and answer.json()["generated_text"]
        computing = ("tgi_kv_blocks_used", "tgi_batch_current_size")
        server.wait_for(
            lambda: not any(Books(server).held[name] for name in computing), "the end of what they asked for"
        )
        with server.client() as client:
            assert client.get("/health").status_code == 200
            assert client.post("/generate", json=native(counting(7), 5)[1]).status_code == 200
    finally:
        for sock in deaf:
            sock.close()
    until_idle(server, before.descriptors)
