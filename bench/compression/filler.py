"""Small talk between the pictures of long conversations, and questions without any; written for this bench."""

TURNS: tuple[tuple[str, str], ...] = (
    (
        "How do bees make honey?",
        "Bees collect nectar from flowers and carry it home in a special stomach. In the hive they pass it from "
        "mouth to mouth, which dries it and changes its sugars. Then they put it into cells of wax and fan it "
        "with their wings until most of the water is gone. What remains is thick and keeps for a very long time.",
    ),
    (
        "Why is the sea salty?",
        "Rain takes up a little acid from the air and slowly dissolves minerals out of rocks. Rivers carry these "
        "salts down to the sea. Water leaves the sea again as vapour, but the salt stays behind. Over many "
        "millions of years it has become as strong as it is today, about thirty-five grams in every litre.",
    ),
    (
        "Can you explain how a bicycle stays upright?",
        "A bicycle that moves is steered all the time, mostly without the rider knowing it. When it leans to the "
        "left, the front wheel turns to the left as well, and the wheels roll back under the weight. The faster "
        "it goes, the smaller the corrections are. Standing still it falls, since there is nothing to correct "
        "with.",
    ),
    (
        "How is bread made?",
        "Flour, water, salt and yeast are mixed into a dough and kneaded until it is smooth. The yeast eats "
        "sugars in the flour and gives off gas, which makes the dough rise for an hour or two. It is shaped, "
        "rests once more, and then goes into a hot oven. The crust becomes hard and fragrant, while the inside "
        "stays soft.",
    ),
    (
        "What did people use before there were clocks?",
        "They looked at the shadow of a stick, or at a sundial, as long as the sun was shining. At night and "
        "indoors they used candles with marks on them, or vessels from which water ran slowly. Sand glasses were "
        "good for short times on ships. Bells told a whole town when to work and when to rest.",
    ),
    (
        "Why do leaves change their colours in autumn?",
        "In summer leaves are full of a green matter that catches light. When the days grow short, the tree takes "
        "back what is useful and stops making more of it. Other colours that were there all the time can then be "
        "seen. A thin layer of cork grows at the stem, and in the end the wind carries the leaf away.",
    ),
    (
        "What is the best way to learn a language?",
        "A little every day is better than much once a week. Listen to people who speak slowly, repeat what they "
        "say, and do not be afraid of mistakes. Read simple stories that you like. Write down words together with "
        "a sentence in which they occur, and look at them again after a day, after a week and after a month.",
    ),
    (
        "How do ships float although they are made of steel?",
        "A ship is hollow. It pushes aside as much water as it weighs itself, and the water pushes back with the "
        "same force. Steel alone would sink, but a hull full of air is lighter than the water that would have its "
        "place. When too much water comes in, the ship grows heavy and goes down.",
    ),
    (
        "Tell me something about mountains.",
        "Mountains grow where large plates of rock press against each other, a few millimetres every year. Rain, "
        "ice and wind wear them down at the same time. High up the air is thin and cold, and few plants can live "
        "there. Old mountains are low and round, young ones are high and sharp.",
    ),
    (
        "How does a library keep its books in order?",
        "Every book has a number that tells its subject, and letters that tell its author. Books about the same "
        "thing stand side by side on the shelf. A catalogue lists all of them by title and name, so that a reader "
        "can find the place quickly. When a book comes back, it is put where its number belongs.",
    ),
    (
        "Why do we need sleep?",
        "While we sleep, the body repairs itself and the brain puts in order what happened during the day. "
        "Without enough of it we forget more, fall ill more often, and are slow to react. Children need nine "
        "hours or more, most grown people seven or eight. A dark and quiet room helps.",
    ),
    (
        "How can I keep my plants healthy?",
        "Most plants want light, but not the burning sun behind a window. Water them when the soil feels dry, and "
        "let what is too much run off. In winter they need less. Turn the pot from time to time so that they grow "
        "straight, and take away leaves that have become yellow. Once a year they like fresh soil.",
    ),
)
HELD_OUT = 8  # the first so many turns stand in long conversations, the others in calibration

ASKED = (
    "Give me three tips for staying healthy.",
    "Explain to a child why the sky is blue.",
    "Write a short story about a fox and a river.",
    "What should I pack for a week in the mountains?",
    "How does a refrigerator keep food cold?",
    "Write an email that asks a colleague to move a meeting to Friday.",
    "What are the main parts of a plant, and what does each of them do?",
    "Describe a market in a small town on a Saturday morning.",
    "How do I cook rice so that it does not stick?",
    "Name some advantages and disadvantages of working from home.",
    "What is the difference between a lake and a pond?",
    "Why is it important to read contracts before signing them?",
)
"""Asked without any picture; the reference's answers are the text that divergence is measured on."""
