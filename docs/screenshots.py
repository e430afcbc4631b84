"""Takes the README's pictures of the page, from results of the default model.

    make serve                   # in another terminal
    python docs/screenshots.py

Needs chromedriver.
"""

import argparse
import io
import shutil
from base64 import b64decode
from dataclasses import dataclass
from pathlib import Path

from PIL import Image
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

IMAGES = Path(__file__).with_name("images")
WIDTH, HEIGHT, MARGIN = 1000, 1190, 12


@dataclass(frozen=True)
class View:
    """A view of the page, by CSS selectors.

    Attributes:
        fragment: Fragment of its URL.
        complete: Elements that it has when it is complete.
        clip: First and last element of the picture.
        struck: Sentence that is struck out before the picture is taken; None: nothing.
        changed: Elements that it has when the result without the sentence is there.
    """

    fragment: str
    complete: str
    clip: tuple[str, str]
    struck: str | None = None
    changed: str = ""


VIEWS = {
    "rank": View(
        "tab=rank&expected=3&run=1",
        "#rank:has(.second[aria-busy=false]) .why h3",
        clip=("#rank .answer-line", "#rank .ranking"),
        struck="#rank .row .unit",
        changed="#rank .row .after:not(:empty)",
    ),
    "explain": View(
        "tab=explain&run=1",
        "#explain .second[aria-busy=false]",
        clip=("main", "#explain .explanation > .card"),
    ),
}
# The first page starts the gradient process.
TIMEOUT_S = 120


def main() -> None:
    """Save a picture of each view in each colour scheme."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    url = parser.parse_args().url
    options = webdriver.ChromeOptions()
    for option in ("--headless", "--no-sandbox", "--hide-scrollbars"):
        options.add_argument(option)
    driver = shutil.which("chromedriver")
    if driver is None:
        parser.exit(1, "chromedriver is not installed\n")
    # Without a path, Selenium looks for a driver on the network.
    browser = webdriver.Chrome(options=options, service=Service(executable_path=driver))
    try:
        for name in VIEWS:
            for scheme in ("light", "dark"):
                (IMAGES / f"{name}-{scheme}.png").write_bytes(picture(browser, url, name, scheme))
    finally:
        browser.quit()


def picture(browser: webdriver.Chrome, url: str, name: str, scheme: str) -> bytes:
    """Return a picture of a view of its example, as PNG with 256 colours."""
    view = VIEWS[name]

    def wait_for(selector: str) -> None:
        WebDriverWait(browser, TIMEOUT_S).until(
            lambda driver: driver.find_elements(By.CSS_SELECTOR, selector)
        )

    size = {"width": WIDTH, "height": HEIGHT, "deviceScaleFactor": 1.5, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    browser.get("about:blank")  # a change of the fragment alone would not load the page
    browser.get(f"{url}/debug#{view.fragment}")
    wait_for(view.complete)
    if view.struck is not None:
        browser.find_element(By.CSS_SELECTOR, view.struck).click()
        wait_for(view.changed)
    shown = browser.execute_cdp_cmd(
        "Page.captureScreenshot", {"captureBeyondViewport": True, "clip": clip_of(browser, view)}
    )
    image = Image.open(io.BytesIO(b64decode(shown["data"]))).convert("RGB")
    file = io.BytesIO()
    image.quantize(256).save(file, "PNG", optimize=True)
    return file.getvalue()


def clip_of(browser: webdriver.Chrome, view: View) -> dict[str, float]:
    """Return the part of the page that a picture of the view shows, for Chromium."""
    first, last = (browser.find_element(By.CSS_SELECTOR, selector).rect for selector in view.clip)
    left, top = first["x"] - MARGIN, first["y"] - MARGIN
    width, height = first["width"] + 2 * MARGIN, last["y"] + last["height"] + MARGIN - top
    return {"x": left, "y": top, "width": width, "height": height, "scale": 1}


if __name__ == "__main__":
    main()
