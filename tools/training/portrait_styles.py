"""What portraits can look like, in words: the options of nine DiceBear styles by the words that describe them.

Every variant was looked at. Words say what is drawn, in every style alike; variants that no word describes, and details
too small for 16 x 16 tokens, are left out. "@hair" stands for a random colour of the hair, as ``hair_red``; a colour
after "=@" is given to the option.
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
    **dict.fromkeys("short long curly fringe bob bun buns pigtails ponytail braids mohawk spiky afro".split(), "hair"),
    **dict.fromkeys("dreadlocks beard moustache goatee".split(), "hair"),
    "skin": "skin",
    **dict.fromkeys("clothes shirt sweater jacket hoodie overalls collar checkered".split(), "clothes"),
    **dict.fromkeys("hat beanie cap turban headscarf".split(), "hat"),
}

# These are in the eyes, which dark glasses cover.
EYES = {"winking", "sleepy", "loving", "dizzy", "crying"}
DARK = {"sunglasses", "eyepatch"}

PORTRAIT_STYLES = {
    "adventurer": Style(
        "Adventurer",
        "Lisa Wischofsky",
        CC_BY,
        FIGMA + "1184595184137881796",
        "skinColor=@skin; hairColor=@hair; eyes=variant01 variant24 variant26; eyebrows=variant10 variant12 variant13",
        (
            {
                "short @hair": "hair=short01 short02 short04 short10 short11 short14",
                "short curly @hair": "hair=short03 short08 short17 short18",
                "mohawk @hair": "hair=short15",
                "spiky short @hair": "hair=short16",
                "bald": "hair=short19",
                "bob @hair": "hair=long01 long21",
                "bob fringe @hair": "hair=long26",
                "long @hair": "hair=long05 long09",
                "long fringe @hair": "hair=long07",
                "long fringe flowers @hair": "hair=long08",
                "long curly @hair": "hair=long06 long17 long22",
                "long curly flowers @hair": "hair=long18",
                "bun @hair": "hair=long10 long11",
                "buns @hair": "hair=long13 long23",
                "pigtails @hair": "hair=long14 long15",
                "ponytail @hair": "hair=long19",
                "braids @hair": "hair=long16",
            },
            {
                "smiling": "mouth=variant22 variant23 variant29",
                "laughing": "mouth=variant25 variant26 variant30; eyes=variant01 variant19",
                "sad": "mouth=variant04; eyebrows=variant07",
                "surprised": "mouth=variant15 variant18; eyebrows=variant11",
                "angry": "mouth=variant09 variant11; eyebrows=variant01 variant02",
                "winking": "mouth=variant02 variant22; eyes=variant21",
                "neutral": "mouth=variant09",
                "tongue": "mouth=variant12 variant16",
                "sleepy": "mouth=variant02; eyes=variant20",
                "kissing": "mouth=variant17",
            },
            {"@skin": ""},
        ),
        (
            (0.25, {"glasses": "glasses=variant02 variant04", "sunglasses": "glasses=variant01"}),
            (0.08, {"moustache": "features=mustache"}),
        ),
    ),
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
                "crying": "mouth=sad; eyes=cry; eyebrows=sadConcerned",
                "surprised": "mouth=disbelief; eyes=surprised; eyebrows=raisedExcited",
                "scared": "mouth=screamOpen; eyes=surprised; eyebrows=sadConcerned",
                "angry": "mouth=serious grimace; eyebrows=angry",
                "winking": "mouth=twinkle smile; eyes=wink",
                "neutral": "mouth=serious; eyes=default side",
                "tongue": "mouth=tongue",
                "loving": "mouth=smile twinkle; eyes=hearts",
                "sleepy": "mouth=serious twinkle; eyes=closed",
                "dizzy": "mouth=grimace; eyes=xDizzy",
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
                0.3,
                {
                    "glasses": "accessories=prescription01 prescription02 round",
                    "sunglasses": "accessories=sunglasses kurt wayfarers",
                    "eyepatch": "accessories=eyepatch",
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
                "winking": "mouth=teethSmile kawaii; eyes=winking",
                "sleepy": "mouth=unimpressed kawaii; eyes=sleepy",
                "neutral": "mouth=unimpressed; eyes=normal",
            },
            {"@skin": ""},
        ),
        (
            (0.25, {"glasses": "accessories=glasses", "sunglasses": "accessories=sunglasses"}),
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
    "lorelei": Style(
        "Lorelei",
        "Lisa Wischofsky",
        CC0,
        FIGMA + "1198749693280469639",
        "skinColor=@skin; hairColor=@hair; head=variant01 variant03; nose=variant01 variant02; "
        "eyes=variant04 variant09 variant10 variant24; eyebrows=variant02 variant05 variant10; "
        "hairAccessoriesColor=ffffff",
        (
            {
                "short @hair": "hair=variant01 variant02 variant03 variant04 variant07 variant08 variant12 variant47",
                "short curly @hair": "hair=variant05 variant09 variant22 variant39 variant44",
                "short fringe @hair": "hair=variant06 variant11",
                "mohawk @hair": "hair=variant27",
                "bob @hair": "hair=variant13 variant17",
                "bob fringe @hair": "hair=variant19",
                "bob curly @hair": "hair=variant18 variant32",
                "long @hair": "hair=variant15 variant21 variant40",
                "long fringe @hair": "hair=variant16 variant23",
                "long curly @hair": "hair=variant24 variant35",
                "bun @hair": "hair=variant38 variant45 variant46",
                "buns @hair": "hair=variant26",
                "ponytail @hair": "hair=variant31 variant33 variant42",
            },
            {
                "smiling": "mouth=happy01 happy02 happy04",
                "laughing": "mouth=happy05 happy06; eyes=variant01 variant22 variant04",
                "sad": "mouth=sad05 sad03; eyebrows=variant01",
                "surprised": "mouth=sad01 sad02; eyes=variant09 variant21",
                "angry": "mouth=sad05 sad06; eyebrows=variant13",
                "winking": "mouth=happy02; eyes=variant15",
                "neutral": "mouth=happy14",
                "tongue": "mouth=happy09",
                "sleepy": "mouth=happy14; eyes=variant19",
            },
            {"@skin": ""},
        ),
        (
            (0.25, {"glasses": "glasses=variant01 variant03 variant04", "sunglasses": "glasses=variant02"}),
            (0.12, {"beard @hair": "beard=variant01 variant02"}),
            (0.06, {"flowers": "hairAccessories=flowers"}),
        ),
    ),
    "micah": Style(
        "Avatar Illustration System (Micah)",
        "Micah Lanier",
        CC_BY,
        FIGMA + "829741575478342595",
        "base=standard; baseColor=@skin; hairColor=@hair; facialHairColor=@hair; shirtColor=@clothes; "
        "glassesColor=000000; earringColor=f4d150; ears=attached; nose=curve pointed tound; eyes=eyes round; "
        "eyebrows=up",
        (
            {
                "short @hair": "hair=fonze",
                "short fringe @hair": "hair=dannyPhantom",
                "long curly @hair": "hair=full",
                "bald": "hair=mrClean",
                "mohawk @hair": "hair=mrT",
                "bob @hair": "hair=pixie",
                "turban @hat": "hair=turban; hairColor=@hat",
            },
            {
                "smiling": "mouth=smile smirk",
                "laughing": "mouth=laughing; eyes=eyes smiling",
                "sad": "mouth=frown sad; eyebrows=down",
                "surprised": "mouth=surprised",
                "kissing": "mouth=pucker",
            },
            {"shirt @clothes": "shirt=open crew", "shirt collar @clothes": "shirt=collared"},
            {"@skin": ""},
        ),
        (
            (0.25, {"glasses": "glasses=round square"}),
            (0.2, {"beard @hair": "facialHair=beard", "stubble": "facialHair=scruff"}),
            (0.15, {"earrings": "earrings=hoop"}),
        ),
    ),
    "open-peeps": Style(
        "Open Peeps",
        "Pablo Stanley",
        CC0,
        "https://www.openpeeps.com",
        "skinColor=@skin; clothingColor=@clothes; headContrastColor=@hair",
        (
            {
                "afro hair_black": "head=afro",
                "bob fringe @hair": "head=bangs",
                "bob fringe hair_black": "head=bangs2",
                "bob hair_black": "head=medium1",
                "bob @hair": "head=grayMedium",
                "bun @hair": "head=grayBun",
                "buns hair_black": "head=buns",
                "braids hair_black": "head=cornrows2",
                "curly short hair_black": "head=dreads1 dreads2",
                "curly long hair_black": "head=longCurly",
                "short hair_black": "head=flatTop short1 short2 short5 shaved2 pomp",
                "short @hair": "head=grayShort short4",
                "long hair_black": "head=long mediumStraight medium3",
                "long fringe hair_black": "head=longBangs mediumBangs",
                "mohawk @hair": "head=mohawk mohawk2",
                "bald": "head=noHair1",
                "hat hat_black": "head=hatHip",
                "headscarf hat_black": "head=hijab",
            },
            {
                "smiling": "face=smile calm",
                "laughing": "face=smileBig smileTeethGap",
                "crying laughing": "face=smileLOL",
                "sad": "face=solemn tired",
                "surprised": "face=awe",
                "scared": "face=fear hectic concernedFear",
                "angry": "face=rage veryAngry angryWithFang",
                "neutral": "face=serious blank",
                "loving": "face=lovingGrin1 lovingGrin2",
                "sleepy": "face=eyesClosed",
            },
            {"shirt @clothes @skin": ""},
        ),
        (
            (
                0.25,
                {
                    "glasses": "accessories=glasses glasses2 glasses3 glasses5",
                    "sunglasses": "accessories=sunglasses sunglasses2",
                    "eyepatch": "accessories=eyepatch",
                },
            ),
            (
                0.15,
                {
                    "beard": "facialHair=full full2 full3",
                    "moustache": "facialHair=moustache5 moustache6 moustache7",
                    "goatee": "facialHair=goatee1 goatee2",
                },
            ),
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
                "winking": "mouth=smile bigSmile; eyes=wink",
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
                "neutral": "mouth=sad04 sad05 sad06 sad07",
            },
            {
                "shirt @clothes": "clothing=variant03 variant05 variant11 variant14",
                "shirt checkered @clothes": "clothing=variant06",
                "overalls @clothes": "clothing=variant10",
            },
            {"@skin": ""},
        ),
        (
            (0.25, {"glasses": "glasses=light02 light05 light06", "sunglasses": "glasses=dark05 dark06 dark07"}),
            (0.12, {"beard": "beard=variant01 variant05 variant07 variant08"}),
            (0.15, {"earrings": "accessories=variant01 variant02 variant03"}),
        ),
    ),
}
