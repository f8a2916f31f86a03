"""The page's files as HTTP gives them; what it does is tested in a browser."""

import re
from importlib import resources

import httpx
import pytest

from tests.gateway.gateway_system import System, gateway_before, whole_system

pytestmark = pytest.mark.asyncio(loop_scope="module")
FILES = {
    file.name: file.read_text(encoding="utf-8")
    for file in (resources.files("gateway.page") / "static").iterdir()
}
# Names of namespaces are no addresses to fetch from.
NAMESPACES = {"http://www.w3.org/2000/svg", "https://html.spec.whatwg.org/multipage/"}


async def test_the_page_and_each_of_its_files_are_served_with_a_strict_policy(
    system: System,
) -> None:
    paths = ["/", *(f"/page/{name}" for name in FILES)]
    assert len(paths) > 10
    for path in paths:
        answer = await system.http.get(path)
        assert answer.status_code == 200, path
        policy = answer.headers["content-security-policy"]
        assert "default-src 'self'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["x-request-id"]
    index = await system.http.get("/")
    assert index.headers["content-type"] == "text/html; charset=utf-8"
    assert (
        (await system.http.get("/page/app.js"))
        .headers["content-type"]
        .startswith("text/javascript")
    )


async def test_an_unchanged_file_is_not_sent_again(system: System) -> None:
    first = await system.http.get("/page/style.css")
    tag = first.headers["etag"]
    for known in (tag, f"W/{tag}", f'"other", {tag}', "*"):
        again = await system.http.get("/page/style.css", headers={"if-none-match": known})
        assert (again.status_code, again.content) == (304, b""), known
        assert again.headers["etag"] == tag
    other = await system.http.get("/page/style.css", headers={"if-none-match": '"other"'})
    assert other.content == first.content


async def test_head_has_the_headers_and_no_body(system: System) -> None:
    whole = await system.http.get("/")
    head = await system.http.head("/")
    assert head.content == b""
    assert head.headers["content-length"] == str(len(whole.content))


@pytest.mark.parametrize(
    "name",
    ["absent.js", "..%2Fpage.py", "%2e%2e%2fpage.py", "static%2Fapp.js", "page.py", "x/y.js"],
)
async def test_no_other_file_can_be_had(system: System, name: str) -> None:
    answer = await system.http.get(f"/page/{name}")
    assert answer.status_code == 404
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


async def test_the_page_takes_no_post(system: System) -> None:
    assert (await system.http.post("/")).status_code == 405


async def test_no_file_names_another_place_or_holds_a_script_inline() -> None:
    for name, text in FILES.items():
        for url in re.findall(r"https?://[^\s\"'`)]+", text):
            assert any(url.startswith(known) for known in NAMESPACES), (name, url)
    index = FILES["index.html"]
    assert not re.search(r"<style|\sstyle=|\son[a-z]+=|<script(?![^>]*\ssrc=)", index)
    named = re.findall(r"(?:src|href)=\"page/([^\"]+)\"", index)
    for name, text in FILES.items():
        if name.endswith(".js"):
            named += re.findall(r"from \"\./([^\"]+)\"", text)
    assert set(named) <= set(FILES)


async def test_the_page_can_be_left_out() -> None:
    async with whole_system(page=False) as system:
        for path in ("/", "/page/app.js"):
            assert (await system.http.get(path)).status_code == 404
        assert (await system.ask()).status_code == 200


async def test_the_page_is_there_while_the_model_is_not() -> None:
    async with (
        gateway_before(1) as port,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", verify=False) as http,
    ):
        assert (await http.get("/")).status_code == 200
