"""The page in a real browser, against a real server. Skipped where there is no Chromium or no playwright."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from asking import png
from scripted import ScriptedSession, eventually, serving
from triptych.core.chat import ImagePart
from triptych.server.config import ServerConfig

api = pytest.importorskip("playwright.sync_api")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")

DESK = {"viewport": {"width": 1280, "height": 800}}
PHONE = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}
DONE = ".message.assistant:last-child[data-state=done]"
RED = base64.b64decode(png(200).partition(",")[2])


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with api.sync_playwright() as playwright:
        args = ["--no-sandbox", "--disable-gpu", "--use-fake-device-for-media-stream"]
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=args)
        yield chromium
        chromium.close()


@pytest.fixture
def visit(browser) -> Iterator[Callable[..., Any]]:
    """Opens the page of a server; what the browser complains of, a breach of the policy above all, is an error."""
    complaints: list[str] = []
    contexts: list[Any] = []

    def visiting(url: str, size: dict[str, Any] | None = None, *, path: str = "/") -> Any:
        context = browser.new_context(**(size or DESK))
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(30_000)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
        page.goto(url + path)
        page.wait_for_selector(".offer")
        return page

    yield visiting
    for context in contexts:
        context.close()
    left = [one for one in complaints if not re.match(r"Failed to load resource", one)]
    assert not left


def ask(page: Any, words: str) -> None:
    page.fill("#words", words)
    page.keyboard.press("Enter")


def test_an_answer_streams_in_and_says_what_it_cost(visit):
    session = ScriptedSession(is_held=True)
    with serving(session) as url:
        page = visit(url)
        ask(page, "slow a b ends")
        page.wait_for_selector(".message.assistant[data-state=waiting][aria-busy=true]")
        session.is_held = False
        page.wait_for_selector(DONE)
        text = page.inner_text(".message.assistant .prose")
        page.click(".figures")
        account = page.inner_text(".account")

    assert text.strip() == "SLOW A B ENDS"
    assert "Answer 4" in " ".join(account.split())
    assert "Text 4" in " ".join(account.split())


def test_another_try_and_another_wording_are_versions(visit):
    session = ScriptedSession()
    with serving(session) as url:
        page = visit(url)
        ask(page, "one ends")
        page.wait_for_selector(DONE)
        page.click("[aria-label='Try again']")
        page.wait_for_selector(".versions")
        assert page.inner_text(".message.assistant .versions") == "2/2"
        page.wait_for_selector(DONE)
        page.keyboard.press("ArrowUp")  # the box is empty: the last message is edited
        page.fill(".editor textarea", "two ends")
        page.keyboard.press("Enter")
        page.wait_for_selector(".message.user .versions")
        page.wait_for_selector(DONE)
        assert page.inner_text(".message.assistant .prose").strip() == "TWO ENDS"
        page.hover(".message.user")
        page.click(".message.user [aria-label='Version before']")
        assert page.inner_text(".message.assistant .prose").strip() == "ONE ENDS"
        page.reload()
        page.click("#conversations .row-button")
        page.wait_for_selector(DONE)
        assert page.inner_text(".bubble") == "one ends"

    assert len(session.chats) == 3


def test_stop_leaves_what_had_arrived_and_reaches_the_engine(visit):
    session = ScriptedSession()
    with serving(session) as url:
        page = visit(url)
        ask(page, "slow words")
        page.wait_for_selector(".message.assistant[data-state=streaming]")
        page.keyboard.press("Escape")
        page.wait_for_selector(".message.assistant[data-state=stopped]")
        assert page.inner_text(".message.assistant .prose").startswith("SLOW")
        assert eventually(lambda: all(stream.is_aborted for stream in session.streams.values()))
        assert page.get_attribute("#send", "aria-label") == "Send"


def test_what_is_deleted_stays_deleted_unless_it_is_wanted_back(visit):
    session = ScriptedSession()
    with serving(session) as url:
        page = visit(url)
        ask(page, "slow words")
        page.wait_for_selector(".message.assistant[data-state=streaming]")
        page.hover("#conversations li:last-child")
        page.click(".row-delete")
        page.wait_for_selector(".offer")
        assert eventually(lambda: all(stream.is_aborted for stream in session.streams.values()))
        page.reload()
        page.wait_for_selector(".offer")
        assert page.locator(".row-delete").count() == 0

        ask(page, "a ends")
        page.wait_for_selector(DONE)
        page.hover("#conversations li:last-child")
        page.click(".row-delete")
        page.wait_for_selector(".offer")
        page.click("text=Undo")
        page.wait_for_selector(DONE)
        assert page.locator(".row-delete").count() == 1


def test_pictures_come_by_file_by_paste_and_by_drop(visit):
    session = ScriptedSession()
    with serving(session) as url:
        page = visit(url)
        page.set_input_files("#file", [{"name": "a.png", "mimeType": "image/png", "buffer": RED}])
        for event, target in (("paste", "document"), ("drop", "window")):
            page.evaluate(SEND_FILE, [event, target, base64.b64encode(RED).decode()])
        page.wait_for_selector(".chip:nth-child(3)")
        page.click(".chip:nth-child(2) .chip-close")
        assert page.locator(".chip").count() == 2
        ask(page, "look ends")
        page.wait_for_selector(DONE)
        assert page.locator(".thumbnails img").count() == 2

    parts = session.chats[-1].messages[0].parts
    sources = [part.source for part in parts if isinstance(part, ImagePart)]
    assert len(sources) == 2
    assert all(base64.b64decode(str(source).partition(",")[2]) == RED for source in sources)


def test_the_camera_takes_a_picture_where_it_may_and_says_so_where_it_may_not(visit):
    session = ScriptedSession()
    with serving(session) as url:
        page = visit(url)
        page.click("#camera")
        page.wait_for_selector("text=may not use the camera")
        page.context.grant_permissions(["camera"], origin=url)
        page.click("#camera")
        page.click(".shutter:enabled")
        page.wait_for_selector(".chip")
        assert page.locator("dialog.camera").count() == 0
        ask(page, "look ends")
        page.wait_for_selector(DONE)

    (source,) = [part.source for part in session.chats[-1].messages[0].parts if isinstance(part, ImagePart)]
    assert base64.b64decode(str(source).partition(",")[2]).startswith(b"\xff\xd8\xff")


SEND_FILE = """([kind, target, base64]) => {
  const bytes = Uint8Array.from(atob(base64), letter => letter.charCodeAt(0)), transfer = new DataTransfer();
  transfer.items.add(new File([bytes], kind + ".png", {type: "image/png"}));
  const facts = {bubbles: true, cancelable: true};
  const event = kind === "paste" ? new ClipboardEvent(kind, {...facts, clipboardData: transfer})
    : new DragEvent(kind, {...facts, dataTransfer: transfer});
  (target === "document" ? document : window).dispatchEvent(event);
}"""


def test_what_is_refused_is_told_in_its_place_with_what_to_do(visit):
    session = ScriptedSession()
    with serving(session) as url:
        page = visit(url)
        ask(page, "refused")
        page.wait_for_selector(".refusal")
        told = page.inner_text(".refusal")
        assert "The encoder needs 9 GB, the device has 8 GB." in told
        assert "Send a smaller picture." in told
        ask(page, "a breaks")
        page.wait_for_selector(".message:last-child .refusal")
        assert page.inner_text(".message:last-child .prose").strip() == "A BREAKS A"
        assert "The device is gone." in page.inner_text(".message:last-child .refusal")
        assert re.search("In the server’s log as [0-9a-f]{32}", page.inner_text(".message:last-child .refusal"))

        session.max_queued = 0
        page.click(".message:last-child .refusal button")
        page.wait_for_selector(".message:last-child .refusal >> text=unfinished")


def test_a_server_that_went_away_is_noticed_and_so_is_its_return(visit):
    with serving(ScriptedSession()) as url:
        page = visit(url)
        page.wait_for_selector("#connection[data-kind=ok]")
        page.route("**/v1/chat/completions", lambda route: route.abort())
        page.route("**/health", lambda route: route.abort())
        ask(page, "a ends")
        page.wait_for_selector(".refusal >> text=The server does not answer.")
        page.wait_for_selector("#connection[data-kind=away]")
        page.unroute("**/v1/chat/completions")
        page.unroute("**/health")
        page.wait_for_selector("#connection[data-kind=ok]")
        page.click(".refusal button")
        page.wait_for_selector(DONE)


def test_a_key_is_asked_for_where_the_server_asks_for_one(visit):
    with serving(ScriptedSession(), ServerConfig(api_keys=("sesame",))) as url:
        page = visit(url)
        page.wait_for_selector("#key")
        for key in ("wrong", "sesame"):
            page.fill("#key", key)
            page.click("text=Continue")
            if key == "wrong":
                page.wait_for_selector(".wrong >> text=does not know this key")
        page.wait_for_selector("#key", state="detached")
        ask(page, "a ends")
        page.wait_for_selector(DONE)
        page.click("[data-panel=code]")
        snippet = page.inner_text("#panel-body pre")
        assert "$TRIPTYCH_API_KEY" in snippet
        assert "sesame" not in snippet


def test_the_request_as_code_really_is_the_request(visit, tmp_path, monkeypatch, capsys):
    session = ScriptedSession()
    (tmp_path / "a.png").write_bytes(RED)
    words = "quotes ' \" and $HOME `x` \\n \\ look ends"
    with serving(session) as url:
        page = visit(url)
        page.set_input_files("#file", str(tmp_path / "a.png"))
        ask(page, words)
        page.wait_for_selector(DONE)
        page.click("[data-panel=code]")
        programs = {}
        for name in ("curl", "Python", "JSON"):
            page.click(f"[role=tab] >> text={name}")
            programs[name] = page.inner_text("#panel-body pre")
        monkeypatch.chdir(tmp_path)
        answer = json.loads(subprocess.check_output(["bash", "-c", programs["curl"].replace("curl ", "curl -s ", 1)]))
        exec(compile(programs["Python"], "snippet", "exec"), {})
        said = capsys.readouterr().out

    assert answer["choices"][0]["message"]["content"].split() == words.upper().split()
    assert said.split() == words.upper().split()
    assert session.chats[0] == session.chats[1] == session.chats[2]
    assert json.loads(programs["JSON"])["messages"][0]["content"][1]["text"] == words


def test_markup_of_a_model_is_text_and_its_markdown_is_shown(visit):
    with serving(ScriptedSession()) as url:
        page = visit(url)
        shown = {text: page.evaluate(SHOW, text) for text in MARKDOWN}

    for text, expected in MARKDOWN.items():
        assert shown[text] == expected


SHOW = """async text => {
  const {show} = await import("/page/markdown.js"), box = document.createElement("div");
  for (let end = 0; end <= text.length; end += 3) show(box, text.slice(0, end));
  show(box, text);
  for (const code of box.querySelectorAll("figure")) code.replaceWith(`«${code.querySelector("pre").textContent}»`);
  return box.getHTML();
}"""
REL = 'target="_blank" rel="noopener noreferrer nofollow"'
MARKDOWN = {
    "<img src=x onerror=alert(1)>": "<p>&lt;img src=x onerror=alert(1)&gt;</p>",
    "[a](javascript:alert(1)) [b](data:text/html,x) [c](/v1/models)": "<p>a b c</p>",
    "![p](https://x.org/p.png)": f'<p><a href="https://x.org/p.png" {REL}>p</a></p>',
    "see https://x.org/a_(b).": f'<p>see <a href="https://x.org/a_(b)" {REL}>https://x.org/a_(b)</a>.</p>',
    "**b** *i* ***bi*** ~~s~~ `a*b*` snake_case_name 2*3*4": "<p><strong>b</strong> <em>i</em> "
    "<strong><em>bi</em></strong> <s>s</s> <code>a*b*</code> snake_case_name 2<em>3</em>4</p>",
    "# One\n\ntwo\nthree\n\n---": "<h2>One</h2><p>two\nthree</p><hr>",
    "- a\n- b\n  1. c\n  2. d\n- e": "<ul><li>a</li><li>b<ol><li>c</li><li>d</li></ol></li><li>e</li></ul>",
    "3. a\n4. b": '<ol start="3"><li>a</li><li>b</li></ol>',
    "1. a\n\n   b\n\n2. c": "<ol><li><p>a</p><p>b</p></li><li><p>c</p></li></ol>",
    "> q\n> - x\n\nend": "<blockquote><p>q</p><ul><li>x</li></ul></blockquote><p>end</p>",
    "```js\nlet a = '<b>';\n\n```\nafter": "«let a = '<b>';\n»<p>after</p>".replace("<b>", "&lt;b&gt;"),
    "- x\n  ```\n  - not an item\n  ```\n- y": "<ul><li>x«- not an item»</li><li>y</li></ul>",
    "~~~\n```\nopen": "«```\nopen»",
    "| a | b |\n|:-:|--:|\n| 1 \\| 2 | `x` |\n\nz": '<div class="table" tabindex="0" role="region" aria-label="Table">'
    '<table><thead><tr><th class="middle" scope="col">a</th><th class="end" scope="col">b</th></tr></thead><tbody><tr>'
    '<td class="middle">1 | 2</td><td class="end"><code>x</code></td></tr></tbody></table></div><p>z</p>',
    "a | b\nno table": "<p>a | b\nno table</p>",
    "": "",
}


def test_no_text_breaks_the_markdown_and_none_becomes_more_than_words(visit):
    with serving(ScriptedSession()) as url:
        assert visit(url).evaluate(FUZZ) == []


FUZZ = r"""async () => {
  const {show} = await import("/page/markdown.js"), bad = [];
  let state = 7;
  const next = n => (state = (state * 1103515245 + 12345) % 2147483648) % n;
  const parts = ["*", "**", "***", "_", "__", "`", "``", "```", "~~~", "~~", "[", "](", ")", "![", "<", "> ", "- ",
    "1. ", "  ", "    ", "\n", "\n\n", "|", "|-|-|", "---", "# ", "word", "a_b", "http://x.y/z", "https://e.org/a(b)",
    "\\", "&amp;", "<b>", "[a](javascript:alert(1))", "\u0000", "🙂", "- [ ] ", "\t", "\r\n", "'", "$"];
  for (let i = 0; i < 1500; i++) {
    let text = "";
    for (let k = next(60); k >= 0; k--) text += parts[next(parts.length)];
    const grown = document.createElement("div"), whole = document.createElement("div");
    try {
      for (let end = 0; end < text.length; end += 1 + next(9)) show(grown, text.slice(0, end));
      show(grown, text);
      show(whole, text);
    } catch (error) { bad.push([String(error), text]); }
    if (grown.getHTML() !== whole.getHTML()) bad.push(["drawn in pieces it looks otherwise", text]);
    for (const node of whole.querySelectorAll("*")) {
      if (/^(script|img|iframe|style|object|embed|form|base|link|meta)$/i.test(node.tagName)) bad.push(["tag", text]);
      for (const {name, value} of node.attributes)
        if (name.startsWith("on") || (name === "href" && !/^(https?|mailto):/.test(value))) bad.push([name, text]);
    }
  }
  return bad.slice(0, 3);
}"""


def test_the_dashboard_moves(visit):
    with serving(ScriptedSession()) as url:
        page = visit(url, path="/#dashboard")
        page.wait_for_selector(".state[data-kind=ok]")
        assert "no answer in the last minute" in page.inner_text(".tiles")
        ask(page, "a b ends")
        page.wait_for_selector(DONE)
        page.wait_for_selector(".tiles >> text=95 % within")
        page.wait_for_selector(".dashboard >> text=Complete")
        assert "decode" in page.inner_text(".stages").lower()
        page.click("#panel-wide")
        assert page.locator(".main").evaluate("node => getComputedStyle(node).visibility") == "hidden"
        page.keyboard.press("Escape")
        assert page.locator("#panel").is_hidden()


def test_settings_are_sent_and_kept_and_left_out_where_nobody_set_them(visit):
    session = ScriptedSession()
    with serving(session) as url:
        page = visit(url)
        ask(page, "a ends")
        page.wait_for_selector(DONE)
        page.click("[data-panel=settings]")
        page.fill("#set-system", "be brief")
        page.fill("#set-temperature", "0.5")
        page.fill("#set-max_tokens", "2")
        page.fill("#set-seed", "7")
        page.reload()
        page.wait_for_selector(".offer")
        ask(page, "b ends")
        page.wait_for_selector(DONE)

    before, after = session.samplings
    assert (before.temperature, before.seed, before.max_tokens) == (0.0, None, session.context - 2)
    assert (after.temperature, after.seed, after.max_tokens) == (0.5, 7, 2)
    assert [message.role for message in session.chats[1].messages] == ["system", "user"]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_words_stand_out_from_what_is_behind_them(visit, theme):
    """WCAG's 4.5 to 1, for every text that is seen."""
    with serving(ScriptedSession()) as url:
        page = visit(url, {**DESK, "color_scheme": theme})
        ask(page, "a ends")
        page.wait_for_selector(DONE)
        ask(page, "refused")
        page.wait_for_selector(".refusal")
        page.click("[data-panel=settings]")
        page.wait_for_timeout(400)  # until nothing fades in any more
        faint = page.evaluate(CONTRAST)

    assert faint == []


CONTRAST = """() => {
  const canvas = new OffscreenCanvas(1, 1).getContext("2d", {willReadFrequently: true});
  const rgba = colour => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const linear = c => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const behind = node => {
    for (; node; node = node.parentElement) {
      const found = rgba(getComputedStyle(node).backgroundColor);
      if (found[3] > 250) return found;
    }
    return [255, 255, 255];
  };
  const faint = [];
  for (const node of document.querySelectorAll("body *")) {
    const hasWords = [...node.childNodes].some(one => one.nodeType === 3 && one.data.trim());
    const isSeen = node.checkVisibility({opacityProperty: true, visibilityProperty: true});
    if (!hasWords || !isSeen || node.closest(".unseen, .skip, :disabled, noscript")) continue;
    const [a, b] = [light(rgba(getComputedStyle(node).color)), light(behind(node))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) faint.push(`${node.textContent.slice(0, 40)} ${ratio.toFixed(2)}`);
  }
  return faint;
}"""


def test_a_phone_shows_all_of_it_and_a_finger_hits_it(visit):
    with serving(ScriptedSession()) as url:
        page = visit(url, PHONE)
        page.tap("#words")
        page.fill("#words", "word " * 60 + "ends")
        page.tap("#send")
        page.wait_for_selector(DONE)
        sizes = page.evaluate(TARGETS)
        page.tap("#sidebar-open")
        page.wait_for_selector("body.with-sidebar")
        page.wait_for_timeout(300)
        page.tap("#new-chat")
        page.wait_for_selector("body.with-sidebar", state="detached")
        for panel in ("settings", "code", "dashboard"):
            page.tap(f"[data-panel={panel}]")
            page.wait_for_selector("#panel-body > *")
            assert page.evaluate("document.documentElement.scrollWidth") <= 390
            assert page.evaluate("document.querySelector('#panel-body').scrollWidth") <= 390
            page.tap("#panel-close")

    assert sizes == []


TARGETS = """() => [...document.querySelectorAll("button, select, textarea")]
  .filter(node => node.checkVisibility({visibilityProperty: true}) && !node.closest(".sidebar"))
  .map(node => [node.getAttribute("aria-label") || node.textContent, node.getBoundingClientRect()])
  .filter(([, box]) => box.width && Math.min(box.width, box.height) < 40)
  .map(([name, box]) => `${name} ${box.width} × ${box.height}`)"""


def test_all_of_it_is_reached_by_keyboard_and_has_a_name(visit):
    with serving(ScriptedSession()) as url:
        page = visit(url)
        ask(page, "a ends")
        page.wait_for_selector(DONE)
        page.evaluate("document.querySelector('.skip').focus()")
        reached = [page.evaluate(FOCUSED)]
        for _ in range(40):
            page.keyboard.press("Tab")
            name = page.evaluate(FOCUSED)
            if name is None:
                break
            reached.append(name)
        page.keyboard.press("Escape")
        page.keyboard.press("/")

        assert page.evaluate("document.activeElement.id") == "words"
    assert all(name.strip() for name in reached)
    assert {
        "Skip to the message box",
        "New conversation",
        "Settings",
        "Dashboard",
        "Copy",
        "Try again",
        "Message",
    } <= set(reached)


FOCUSED = """() => { const node = document.activeElement; if (node === document.body) return null;
  const name = node.getAttribute("aria-label") || node.textContent || node.placeholder || "";
  return getComputedStyle(node).outlineStyle === "none" && !node.closest(".composer") ? "" : name.trim(); }"""
