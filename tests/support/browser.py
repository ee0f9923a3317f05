"""A real browser for the tests of pages: Debian's chromium, driven over its debugging pipe; nothing else is needed."""

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import time

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
WHY = "chromium is not installed: it shows the page"
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--remote-debugging-pipe",
    "--no-first-run",
    "--disable-background-networking",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    "--hide-scrollbars",
)
PATIENCE = 120.0  # seconds; a busy machine takes its time


class Browser:
    """One page; `faults` are what it said on its console, and `asked` the addresses it asked for."""

    def __init__(self, folder):
        ours, theirs = os.pipe(), os.pipe()
        high = [fcntl.fcntl(end, fcntl.F_DUPFD, 50) for end in (theirs[0], ours[1])]

        command = [CHROMIUM, *FLAGS, f"--user-data-dir={folder / 'profile'}", "about:blank"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        # the pipe must be 3 and 4 there; a step between instead of work after a fork, which JAX warns of
        step = f"import os, sys; os.dup2({high[0]}, 3); os.dup2({high[1]}, 4); os.execv(sys.argv[1], sys.argv[1:])"
        self.process = subprocess.Popen(
            [sys.executable, "-S", "-c", step, *command], pass_fds=high, **quiet
        )
        for end in (*high, theirs[0], ours[1]):
            os.close(end)
        self.read, self.write = ours[0], theirs[1]
        self.number, self.rest, self.session = 0, b"", None
        self.faults, self.asked = [], []
        page = next(t for t in self.tell("Target.getTargets")["targetInfos"] if t["type"] == "page")
        self.session = self.tell("Target.attachToTarget", targetId=page["targetId"], flatten=True)[
            "sessionId"
        ]
        for part in ("Page", "Runtime", "Network", "Log"):
            self.tell(f"{part}.enable")

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.session = None
        self.tell("Browser.close")
        self.process.wait(PATIENCE)
        os.close(self.read)
        os.close(self.write)

    def tell(self, method, **given):
        """One command, and its answer."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": given}
        os.write(
            self.write,
            json.dumps(message | ({"sessionId": self.session} if self.session else {})).encode()
            + b"\0",
        )
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            for heard in self.messages(until):
                if heard.get("id") == self.number:
                    assert "error" not in heard, (method, heard)
                    return heard["result"]
        raise TimeoutError(method)

    def messages(self, until):
        if select.select([self.read], [], [], max(0, until - time.monotonic()))[0]:
            self.rest += os.read(self.read, 1 << 20)
        *whole, self.rest = self.rest.split(b"\0")
        answers = [json.loads(text) for text in whole]
        for heard in answers:
            self.notice(heard.get("method"), heard.get("params", {}))
        return answers

    def notice(self, method, said):
        if method == "Network.requestWillBeSent":
            self.asked.append(said["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.faults.append(
                said["exceptionDetails"].get("exception", {}).get("description", "an exception")
            )
        elif method == "Runtime.consoleAPICalled" and said["type"] in (
            "error",
            "warning",
            "assert",
        ):
            self.faults.append(str(said["args"]))
        elif method == "Log.entryAdded" and said["entry"]["level"] in ("error", "warning"):
            self.faults.append(said["entry"]["text"] + " " + said["entry"].get("url", ""))

    def go(self, address):
        self.tell("Page.navigate", url=address)
        self.until("document.readyState === 'complete'")

    def run(self, script):
        """The value of an expression in the page; a promise is waited for."""
        done = self.tell(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def until(self, script, seconds=PATIENCE):
        """Wait until an expression is true, and return it."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            value = self.run(script)
            if value:
                return value
            time.sleep(0.05)
        raise TimeoutError(f"{script} did not become true; faults: {self.faults}")

    def look(self, width, height=1000, dark=False):
        """A window of this size; light or dark."""
        self.tell(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.tell("Emulation.setEmulatedMedia", features=[scheme])

    def press(self, key, code=None, text=None):
        """A key, as from the keyboard."""
        more = {"text": text} if text else {}
        self.tell(
            "Input.dispatchKeyEvent",
            type="keyDown",
            key=key,
            code=code or key,
            windowsVirtualKeyCode=KEYS.get(key, 0),
            **more,
        )
        self.tell(
            "Input.dispatchKeyEvent",
            type="keyUp",
            key=key,
            code=code or key,
            windowsVirtualKeyCode=KEYS.get(key, 0),
        )

    def picture(self, path):
        """The whole page as a PNG file, for people."""
        shot = self.tell("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))


KEYS = {"Tab": 9, "Enter": 13, " ": 32, "ArrowLeft": 37, "ArrowRight": 39, "End": 35, "Home": 36}
