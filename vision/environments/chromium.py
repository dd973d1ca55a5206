"""A headless Chromium for pages that are given as text: no network, no scripts, one per process."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from collections.abc import Coroutine, Mapping, Sequence
from functools import cache
from typing import Any

from mmrl.config.schema import ConfigError

# Names of Chromium on PATH, the lightest first; Debian has packages of the first two names.
EXECUTABLES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
SWITCHES = (
    "--headless", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--host-resolver-rules=MAP * ~NOTFOUND",
)  # fmt: skip
ADDRESS = "http://task.invalid/"  # the only URL that is served (from memory)
LIMIT = 30.0  # time limit of an action and its screenshot, in seconds
CONCURRENT = 8  # maximum number of pages that are open at once
KEPT = 256  # maximum number of cached screenshots of newly opened pages

# JavaScript that is run on pages. It gets data as arguments, so that no data becomes code.
READ_FIELDS = """() => {
  const state = {};
  for (const field of document.querySelectorAll("input, select")) {
    const options = field.selectedOptions ?? (field.type == "text" || field.checked ? [field] : []);
    state[field.name] = [...(state[field.name] ?? []), ...Array.from(options, (one) => one.value)];
  }
  return state;
}"""
SCROLL = "pixels => window.scrollBy(0, pixels)"


def find_chromium(executable: str = "", **others: Any) -> str:
    """Return the path of Chromium: `executable`, a path or a name on PATH, or the first of `EXECUTABLES`.

    Raises ConfigError if there is none. `others`, the environment's other options, are ignored.
    """
    for name in (executable,) if executable else EXECUTABLES:
        if path := shutil.which(name):
            return path
    missing = f"'{executable}' is" if executable else f"none of {', '.join(EXECUTABLES)} is on PATH, or"
    raise ConfigError(
        f"environment 'vision.browser' needs the executable of Chromium beside pip install 'mmrl[browser]': "
        f"{missing} no program that can be run. Debian: apt install chromium-headless-shell, or chromium; "
        "elsewhere set `executable` to its path"
    )


class Chromium:
    """A browser with a thread of its own, which serves all threads of a process.

    Playwright's objects belong to one event loop, while tools are called from many threads. Chromium starts
    with the first page, and again if it has crashed. It ends with the process, even if the process is killed.
    """

    def __init__(self, executable: str) -> None:
        self.executable, self.driver, self.browser = executable, None, None
        self.loop, self.starting = asyncio.new_event_loop(), asyncio.Lock()
        self.free = asyncio.Semaphore(CONCURRENT)
        self.firsts: dict[tuple[str, int], asyncio.Task[bytes]] = {}
        threading.Thread(target=self.loop.run_forever, name="chromium", daemon=True).start()

    def run(self, work: Coroutine) -> Any:
        """Run a coroutine in the browser's thread; raises TimeoutError after `LIMIT` seconds."""

        async def limited() -> Any:
            async with self.free:
                return await asyncio.wait_for(work, LIMIT)

        return asyncio.run_coroutine_threadsafe(limited(), self.loop).result()

    async def open(self, html: str, size: int) -> Any:
        """Show a page in a new browser context and return it; every other request is refused."""
        context = await (await self._started()).new_context(
            viewport={"width": size, "height": size}, java_script_enabled=False,
            service_workers="block", accept_downloads=False,
        )  # fmt: skip
        context.set_default_timeout(LIMIT * 1000)

        async def answer(route: Any) -> None:
            if route.request.url == ADDRESS:
                await route.fulfill(body=html, content_type="text/html")
            else:
                await route.fulfill(status=204)  # no content: the page stays as it is

        await context.route("**/*", answer)
        page = await context.new_page()
        await page.goto(ADDRESS)
        return page

    async def first(self, html: str, size: int) -> bytes:
        """Return the screenshot of a page right after opening (PNG), cached for equal pages."""
        key = html, size
        if key not in self.firsts:
            if len(self.firsts) >= KEPT:
                del self.firsts[next(iter(self.firsts))]
            self.firsts[key] = asyncio.ensure_future(self._first(html, size))
        try:
            return await asyncio.shield(self.firsts[key])
        except BaseException:
            self.firsts.pop(key, None)  # a later try opens the page again
            raise

    def close(self, page: Any) -> None:
        """Close a page and its context, without waiting for it."""
        asyncio.run_coroutine_threadsafe(page.context.close(), self.loop)

    async def _first(self, html: str, size: int) -> bytes:
        page = await self.open(html, size)
        try:
            return await page.screenshot()
        finally:
            await page.context.close()

    async def _started(self) -> Any:
        from playwright.async_api import async_playwright  # pyright: ignore[reportMissingImports]

        async with self.starting:
            if self.browser is None or not self.browser.is_connected():
                self.driver = self.driver or await async_playwright().start()
                self.browser = await self.driver.chromium.launch(
                    executable_path=self.executable,
                    args=SWITCHES,
                    chromium_sandbox=os.geteuid() != 0,  # root cannot use the sandbox
                )
        return self.browser


async def fields_of(page: Any) -> Mapping[str, Sequence[str]]:
    """Read the values of the fields of a page by name."""
    return await page.evaluate(READ_FIELDS)


def chromium(executable: str = "") -> Chromium:
    """Return the browser of this process."""
    return _of_process(find_chromium(executable), os.getpid())


@cache
def _of_process(executable: str, pid: int) -> Chromium:
    return Chromium(executable)
