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
# The first page starts the gradient process.
TIMEOUT_S = 120


def main() -> None:
    """Save a picture for each colour scheme."""
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
        for scheme in ("light", "dark"):
            (IMAGES / f"explain-{scheme}.png").write_bytes(picture(browser, url, scheme))
    finally:
        browser.quit()


def picture(browser: webdriver.Chrome, url: str, scheme: str) -> bytes:
    """Return a picture of the explained example, as PNG with 256 colours."""
    size = {"width": WIDTH, "height": HEIGHT, "deviceScaleFactor": 1.5, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    browser.get("about:blank")  # a change of the fragment alone would not load the page
    browser.get(f"{url}/debug#tab=explain&run=1")
    done = (By.CSS_SELECTOR, ".second[aria-busy=false]")
    WebDriverWait(browser, TIMEOUT_S).until(lambda driver: driver.find_elements(*done))
    image = Image.open(io.BytesIO(browser.get_screenshot_as_png())).convert("RGB")
    file = io.BytesIO()
    image.quantize(256).save(file, "PNG", optimize=True)
    return file.getvalue()


if __name__ == "__main__":
    main()
