"""A hundred realistic texts: languages, emoji, code, 1 to 600 words."""

import random

SENTENCES = (
    "Hello",
    "ok 👍",
    "The library opens at nine and closes at six, except on public holidays.",
    "My parcel was marked as delivered yesterday, but nobody at home has seen it.",
    "How do I reset the password of an account whose e-mail address no longer exists?",
    "Interest is charged daily on the outstanding balance and billed once a month.",
    "She tuned the old piano by ear, one stubborn string after another.",
    "A gradient that vanishes in the first layers teaches them nothing.",
    "Return policy: 30 days, unopened, with receipt. No exceptions!!!",
    "Why is the sky blue at noon and red at dusk?",
    "The patient reports mild headaches since Tuesday; no fever, no nausea.",
    "Two trains leave at 14:05 and 14:17; the later one arrives earlier.",
    "Please find attached the minutes of our meeting of 3 March.",
    "He said \"it's fine\", which - as everyone knew - it wasn't.",
    "Prices rose by 4.7 % year on year, the sharpest increase since 2008.",
    "The cheapest flight from Lisbon to Oslo has two stops and takes eleven hours.",
    "Rain is expected in the north, with gusts of up to 90 km/h on the coast.",
    "What is the difference between a list and a tuple in Python?",
    "I would not recommend this hotel: thin walls, cold coffee, rude staff.",
    "Absolutely loved it! Best headphones I have ever owned 🎧🔥",
    "Der Zug nach München fährt heute von Gleis sieben ab.",
    "Können Sie mir bitte die Rechnung noch einmal schicken?",
    "Die Straße ist wegen Bauarbeiten bis Freitag gesperrt.",
    "Le petit café au coin de la rue ferme à dix-neuf heures.",
    "Où puis-je trouver un médecin qui parle français ?",
    "L'été dernier, nous avons traversé les Alpes à vélo.",
    "El perro duerme bajo la mesa mientras llueve afuera.",
    "¿Cuánto cuesta enviar un paquete a Argentina?",
    "La receta lleva harina, huevos, azúcar y una pizca de sal.",
    "O mar estava calmo e o barco deslizava sem ruído.",
    "Il gatto nero attraversò la strada senza voltarsi.",
    "De fiets staat tegen de muur van het oude station.",
    "Kedi güneşte uyurken kuşlar öttü.",
    "Kissa nukkuu sohvalla ja näkee unta hiiristä.",
    "Zażółć gęślą jaźń: zdanie ze wszystkimi polskimi znakami.",
    "Příliš žluťoučký kůň úpěl ďábelské ódy.",
    "Сегодня утром в парке было тихо и холодно.",
    "Где находится ближайшая аптека?",
    "Η γάτα κοιμάται στον ήλιο όλη μέρα.",
    "הספר נמצא על המדף העליון בחדר העבודה.",
    "القطة نائمة على السجادة بجانب النافذة.",
    "बिल्ली खिड़की के पास सो रही है।",
    "แมวกำลังนอนหลับอยู่บนเก้าอี้",
    "猫が窓辺で静かに眠っている。",
    "東京から京都まで新幹線で二時間ほどかかります。",
    "今天天气很好，我们去公园散步吧。",
    "请问最近的地铁站在哪里？",
    "고양이가 창가에서 잠을 자고 있다.",
    "Con mèo đang ngủ trên ghế sô pha.",
    "🎉🎉🎉 we won!!! 🏆",
    "👩‍💻 + ☕ = 🚀",
    "❤️ 💔 🙃 🤷‍♀️",
    "def mean(xs):\n    return sum(xs) / len(xs)",
    "SELECT name, COUNT(*) FROM orders GROUP BY name HAVING COUNT(*) > 3;",
    "for (int i = 0; i < n; ++i) { a[i] += b[i]; }",
    "const f = async (x) => (await fetch(`/api/${x}`)).json();",
    '<div class="card"><p>Hello &amp; goodbye</p></div>',
    "git commit -m 'fix: off-by-one in the pager' && git push",
    "Traceback (most recent call last): KeyError: 'user_id'",
    '{"id": 17, "tags": ["a", "b"], "ok": true, "ratio": 0.25}',
    "https://example.org/a/path?query=1&other=two#fragment",
    "E = mc², ∑ᵢ xᵢ ≤ ∞, α → β, ℝⁿ ⊂ ℂⁿ",
    "C:\\Users\\anna\\Documents\\report_final_v2 (1).docx",
    "+49 (0)30 1234567, Mon-Fri 9-17h",
    "x" * 120,
    "..., --- !!! ??? ;;; ### $$$ %%%",
    "naïve café façade coöperate Ångström jalapeño",
    "\tTabs,\n\nnewlines\r\nand   many    spaces  ",
    "1 22 333 4444 55555 666666 7777777 88888888",
    "IN THE EVENT OF FIRE DO NOT USE THE LIFTS",
)


def mixed_texts(count: int = 100) -> list[str]:
    """Return distinct texts: the sentences, and seeded concatenations of up to 600 words."""
    rng = random.Random(7)  # noqa: S311 - not for secrets
    texts = list(SENTENCES)
    while len(texts) < count:
        words: list[str] = []
        length = rng.choice((20, 60, 120, 250, 600))
        while len(words) < length:
            words += rng.choice(SENTENCES).split()
        texts.append(" ".join(words[:length]))
    assert len(set(texts)) == count
    return texts


def calibration_texts(count: int = 1200) -> list[str]:
    """Return distinct texts of 3 to 12 seeded words, each time the same."""
    rng = random.Random(11)  # noqa: S311 - not for secrets
    words = sorted({word for sentence in SENTENCES[:20] for word in sentence.split()})
    texts = [" ".join(rng.choices(words, k=rng.randint(3, 12))) for _ in range(count)]
    assert len(set(texts)) == count
    return texts
