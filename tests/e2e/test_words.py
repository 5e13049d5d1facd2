"""Help pages, their images and translations, as a server gives them to the front end."""

import asyncio
import json
import re

import aiohttp
import pytest

from tools.comfy_server import PACK, PACK_FOLDER

NODES = json.loads((PACK / "locales/en/nodeDefs.json").read_text("utf-8"))


async def fetch(url: str) -> tuple[int, bytes]:
    async with aiohttp.ClientSession() as session, session.get(url) as reply:
        return reply.status, await reply.read()


@pytest.mark.parametrize("language", ["en", "zh"])
def test_translations_are_offered(comfy, language):
    offered = comfy.get("/i18n")[language]
    for file in ("nodeDefs", "main"):
        own = json.loads((PACK / f"locales/{language}/{file}.json").read_text("utf-8"))
        given = offered["nodeDefs"] if file == "nodeDefs" else offered
        assert own == {key: given[key] for key in own}


@pytest.mark.parametrize("node", NODES)
def test_the_image_of_a_help_page_is_served(comfy, node):
    root = f"{comfy.url}/extensions/{PACK_FOLDER}/docs"  # from where the front end resolves what a page names
    for language in ("en", "zh"):
        status, page = asyncio.run(fetch(f"{root}/{node}/{language}.md"))
        assert status == 200
        [image] = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", page.decode())
    status, data = asyncio.run(fetch(f"{root}/{image}"))
    assert status == 200 and data[8:12] == b"WEBP"
