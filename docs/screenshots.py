"""Takes the README's pictures of the page, from results of the default model.

    make serve                   # in another terminal
    python docs/screenshots.py

Needs chromedriver.
"""

import argparse
import io
import shutil
from pathlib import Path

from PIL import Image
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

IMAGES = Path(__file__).with_name("images")
WIDTH, HEIGHT = 1200, 1190
# Fragment of each view's URL, and the elements that it has when it is complete.
VIEWS = {
    "rank": ("tab=rank&expected=3&run=1", "#rank:has(.second[aria-busy=false]) .why h3"),
    "explain": ("tab=explain&run=1", "#explain .second[aria-busy=false]"),
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
    fragment, complete = VIEWS[name]
    size = {"width": WIDTH, "height": HEIGHT, "deviceScaleFactor": 1.5, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    browser.get("about:blank")  # a change of the fragment alone would not load the page
    browser.get(f"{url}/debug#{fragment}")
    WebDriverWait(browser, TIMEOUT_S).until(
        lambda driver: driver.find_elements(By.CSS_SELECTOR, complete)
    )
    image = Image.open(io.BytesIO(browser.get_screenshot_as_png())).convert("RGB")
    file = io.BytesIO()
    image.quantize(256).save(file, "PNG", optimize=True)
    return file.getvalue()


if __name__ == "__main__":
    main()
