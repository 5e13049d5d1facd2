"""What portraits can look like, in words: the options of five DiceBear styles by the words that describe them.

Every variant was looked at. Words say what is drawn, in every style alike; variants that no word describes, and details
too small for 16 x 16 tokens, are left out. A word is learned from many images that show it, so faces have few
expressions, and every other one that can has glasses. "@hair" stands for a random colour of the hair, as ``hair_red``;
a colour after "=@" is given to the option.
"""

from typing import NamedTuple

from .settings import BACKGROUNDS, COLOURS

VERSION = "9.4.3"  # of all packages @dicebear/...

SKIN = {"light": "f8dcc4", "tan": "dfa678", "brown": "b4764a", "dark": "85583a"}
HAIR = {
    "black": "23201f",
    "brown": "5f3a20",
    "blond": "e6c66e",
    "red": "c4481c",
    "gray": "969696",
    "white": "efece6",
    "blue": "3b6fd4",
    "pink": "ee7fb2",
    "green": "46a854",
    "purple": "8149b8",
}
CLOTHES = {name: "{:02x}{:02x}{:02x}".format(*rgb) for name, rgb in BACKGROUNDS.items()}
ROBOT = {name: CLOTHES[name] for name in COLOURS}  # plain colour words, as of other objects
PALETTES = {"skin": SKIN, "hair": HAIR, "clothes": CLOTHES, "hat": CLOTHES, "robot": ROBOT}

Choice = dict[str, str]  # words -> "option=variant variant; option=variant": one variant of each is drawn


class Style(NamedTuple):
    """The licence of a style's drawings, and the choices: one of each ``always``, and of ``sometimes`` at a share."""

    title: str
    designer: str
    licence: str
    source: str
    fixed: str
    always: tuple[Choice, ...]
    sometimes: tuple[tuple[float, Choice], ...] = ()


CC0, CC_BY, FREE = "CC0 1.0", "CC BY 4.0", "Free for personal and commercial use"
FIGMA = "https://www.figma.com/community/file/"

# Words before which a colour is one of the palette's: "red curly hair", "red beard".
NOUNS = {
    "background": "bg",
    "hair": "hair",
    **dict.fromkeys("short long curly fringe bob bun buns pigtails braids mohawk spiky afro".split(), "hair"),
    **dict.fromkeys("dreadlocks beard moustache goatee".split(), "hair"),
    "skin": "skin",
    **dict.fromkeys("clothes shirt sweater jacket hoodie overalls collar checkered".split(), "clothes"),
    **dict.fromkeys("hat beanie cap turban headscarf".split(), "hat"),
}

# These are in the eyes, which dark glasses cover.
EYES = {"sleepy", "loving", "dizzy"}
DARK = {"sunglasses"}

PORTRAIT_STYLES = {
    "avataaars": Style(
        "Avataaars",
        "Pablo Stanley",
        FREE,
        "https://avataaars.com",
        "style=default; nose=default; skinColor=@skin; hairColor=@hair; facialHairColor=@hair; clothesColor=@clothes; "
        "hatColor=@hat; accessoriesColor=262e33; eyes=default; eyebrows=default",
        (
            {
                "short @hair": "top=shortFlat shortRound shortWaved theCaesar shortCurly",
                "short fringe @hair": "top=shaggy",
                "spiky short @hair": "top=dreads02",
                "curly @hair": "top=curly",
                "bald": "",
                "bun @hair": "top=bun",
                "bob @hair": "top=bob miaWallace",
                "long @hair": "top=straight01 straight02 straightAndStrand",
                "long curly @hair": "top=curvy bigHair",
                "dreadlocks long @hair": "top=dreads",
                "afro @hair": "top=fro",
                "hat @hat": "top=hat",
                "headscarf @hat": "top=hijab",
                "turban @hat": "top=turban",
                "beanie @hat": "top=winterHat1 winterHat02 winterHat03",
            },
            {
                "smiling": "mouth=twinkle",
                "laughing": "mouth=smile; eyes=happy default",
                "sad": "mouth=sad; eyebrows=sadConcerned",
                "surprised": "mouth=screamOpen; eyes=surprised; eyebrows=raisedExcited",
                "angry": "mouth=grimace; eyebrows=angry",
                "loving": "mouth=smile twinkle; eyes=hearts",
            },
            {
                "shirt @clothes": "clothing=shirtCrewNeck shirtScoopNeck shirtVNeck",
                "jacket @clothes": "clothing=blazerAndShirt blazerAndSweater",
                "sweater collar @clothes": "clothing=collarAndSweater",
                "hoodie @clothes": "clothing=hoodie",
                "overalls @clothes": "clothing=overall",
            },
            {"@skin": ""},
        ),
        (
            (
                0.5,
                {
                    "glasses": "accessories=prescription01 prescription02 round",
                    "sunglasses": "accessories=sunglasses kurt wayfarers",
                },
            ),
            (
                0.15,
                {
                    "beard @hair": "facialHair=beardLight beardMedium beardMajestic",
                    "moustache @hair": "facialHair=moustacheFancy moustacheMagnum",
                },
            ),
        ),
    ),
    "big-smile": Style(
        "Custom Avatar (Big Smile)",
        "Ashley Seo",
        CC_BY,
        FIGMA + "881358461963645496",
        "face=base; skinColor=@skin; hairColor=@hair; eyes=normal cheery",
        (
            {
                "short @hair": "hair=shortHair shavedHead",
                "short fringe @hair": "hair=bowlCutHair",
                "short curly @hair": "hair=curlyShortHair",
                "mohawk @hair": "hair=mohawk",
                "bun @hair": "hair=bunHair froBun",
                "bob curly @hair": "hair=curlyBob",
                "long @hair": "hair=straightHair",
                "long curly @hair": "hair=wavyBob",
                "long fringe @hair": "hair=bangs",
                "braids @hair": "hair=braids",
            },
            {
                "smiling": "mouth=teethSmile awkwardSmile kawaii",
                "laughing": "mouth=openedSmile gapSmile",
                "sad": "mouth=openSad; eyes=sad",
                "angry": "mouth=unimpressed; eyes=angry",
                "sleepy": "mouth=unimpressed kawaii; eyes=sleepy",
            },
            {"@skin": ""},
        ),
        (
            (0.5, {"glasses": "accessories=glasses", "sunglasses": "accessories=sunglasses"}),
            (0.08, {"moustache": "accessories=mustache"}),
        ),
    ),
    "bottts": Style(
        "Bottts",
        "Pablo Stanley",
        FREE,
        "https://bottts.com",
        "baseColor=@robot; sides=cables01 round square antenna02",
        (
            {"round @robot": "face=round01 round02", "square @robot": "face=square01 square02"},
            {
                "antenna": "top=antenna antennaCrooked",
                "horns": "top=horns",
                "bulb": "top=bulb01 glowingBulb01 glowingBulb02",
                "": "",
            },
            {
                "": "eyes=round glow bulging roundFrame02",
                "visor": "eyes=eva frame1 frame2 robocop shade01 roundFrame01",
                "loving": "eyes=hearts",
                "dizzy": "eyes=dizzy",
            },
            {
                "smiling": "mouth=smile01",
                "laughing": "mouth=smile02",
                "neutral": "mouth=square01 square02 grill02",
                "teeth": "mouth=bite grill03",
            },
        ),
    ),
    "personas": Style(
        "Personas",
        "Draftbit",
        CC_BY,
        "https://personas.draftbit.com",
        "skinColor=@skin; hairColor=@hair; clothingColor=@clothes; nose=smallRound mediumRound",
        (
            {
                "short @hair": "hair=shortCombover shortComboverChops fade",
                "short curly @hair": "hair=curlyHighTop",
                "afro @hair": "hair=curly",
                "bald": "hair=bald",
                "mohawk @hair": "hair=mohawk",
                "bob @hair": "hair=bobCut",
                "bob fringe @hair": "hair=bobBangs",
                "bun headband @hair": "hair=straightBun",
                "curly bun headband @hair": "hair=curlyBun",
                "long @hair": "hair=long extraLong",
                "pigtails @hair": "hair=pigtails",
                "cap hat_orange": "hair=cap",
                "beanie hat_red": "hair=beanie",
            },
            {
                "smiling": "mouth=smile smirk; eyes=open",
                "laughing": "mouth=bigSmile; eyes=open happy",
                "sad": "mouth=frown; eyes=open",
                "surprised": "mouth=surprise; eyes=open",
                "sleepy": "mouth=smile; eyes=sleep",
                "smiling glasses": "mouth=smile smirk; eyes=glasses",
                "smiling sunglasses": "mouth=smile smirk; eyes=sunglasses",
                "sad glasses": "mouth=frown; eyes=glasses",
            },
            {"shirt @clothes": "body=squared rounded", "shirt checkered @clothes": "body=checkered"},
            {"@skin": ""},
        ),
        (
            (
                0.15,
                {
                    "beard @hair": "facialHair=beardMustache",
                    "goatee @hair": "facialHair=goatee",
                    "moustache @hair": "facialHair=pyramid walrus",
                },
            ),
        ),
    ),
    "pixel-art": Style(
        "Pixel Art",
        "DiceBear",
        CC0,
        FIGMA + "1198754108850888330",
        "skinColor=@skin; hairColor=@hair; clothingColor=@clothes; hatColor=@hat; accessoriesColor=daa520; "
        "mouthColor=c98276; glassesColor=323232; eyesColor=5b7c8b; "
        "eyes=variant01 variant06 variant07 variant08 variant09 variant11",
        (
            {
                "short @hair": "hair=short02 short04 short06 short08 short09 short10 short15 short16 short17",
                "spiky @hair": "hair=short11 short13",
                "long @hair": "hair=long01 long07 long09 long12 long13",
                "bob @hair": "hair=long04 long17 long21",
                "bun @hair": "hair=long05",
                "buns @hair": "hair=long14",
                "braids @hair": "hair=long18",
                "hat @hat": "hair=short04; hat=variant02 variant06 variant07",
                "beanie @hat": "hair=short04; hat=variant01 variant03 variant04 variant10",
                "long hat @hair @hat": "hair=long13 long21; hat=variant06 variant07",
            },
            {
                "smiling": "mouth=happy07 happy08 happy09",
                "laughing": "mouth=happy06 happy12",
                "sad": "mouth=sad01 sad10; eyes=variant12 variant01",
                "surprised": "mouth=happy01 happy13",
            },
            {
                "shirt @clothes": "clothing=variant03 variant05 variant11 variant14",
                "shirt checkered @clothes": "clothing=variant06",
                "overalls @clothes": "clothing=variant10",
            },
            {"@skin": ""},
        ),
        (
            (0.5, {"glasses": "glasses=light02 light05 light06", "sunglasses": "glasses=dark05 dark06 dark07"}),
            (0.12, {"beard": "beard=variant01 variant05 variant07 variant08"}),
            (0.15, {"earrings": "accessories=variant01 variant02 variant03"}),
        ),
    ),
}
