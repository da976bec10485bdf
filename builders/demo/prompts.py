"""Writes the prompts of the demo: ``python -m hdtool.builders.demo.prompts --gsm8k DIR --out FILE``.

The questions come from pages and source files that the demo model was not trained on, equally many of each kind, in an
order given by a hash. ``reference`` is the held-out answer.

``--learned N`` writes N questions of each kind from the training data instead, none of them held out, to collect the
model's answers to them. ``--everyday`` writes the questions that the demo's real model answers: what people ask a chat
model, from lists of topics and question forms, together with questions from GSM8K's training split, from Python's
documentation and from functions of its standard library. Neither the demo nor Spec-Bench asks any of them.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hdtool.builders.demo.corpus import TrainingDocument, demo_arguments, documents, stable_hash
from hdtool.data.errors import PromptError
from hdtool.data.output_files import OutputFile, is_json_lines_with
from hdtool.data.prompts import Prompt

PROMPT_KINDS = ("math", "explain", "write", "edit")
PROMPTS_PER_KIND = 50
PROMPT_KEYS = ("id", "category", "messages", "reference", "from")
"""Keys of a line; lines of training questions have only the first three."""


def prompts(everything: Iterable[TrainingDocument], per_kind: int = PROMPTS_PER_KIND) -> Iterator[dict[str, Any]]:
    """Yield held-out prompts, alternating between kinds so that the first prompts cover every kind."""
    held_out = sorted((d for d in everything if d.held_out and d.question), key=lambda d: stable_hash(d.name))
    once = {document.question: document for document in held_out}
    for number, row in enumerate(one_of_each_kind(once.values(), per_kind), start=1):
        for document in row:
            yield {
                "id": f"{document.kind}-{number:02}",
                "category": document.kind,
                "messages": [{"role": "user", "content": document.question}],
                "reference": document.answer,
                "from": document.name,
            }


def one_of_each_kind(ordered: Collection[TrainingDocument], per_kind: int) -> Iterator[tuple[TrainingDocument, ...]]:
    """Yield at most ``per_kind`` tuples, each with one document of every kind."""
    return zip(*([d for d in ordered if d.kind == kind][:per_kind] for kind in PROMPT_KINDS), strict=False)


def learned_questions(everything: Sequence[TrainingDocument], per_kind: int) -> Iterator[Prompt]:
    """Yield distinct training questions, alternating between kinds; each kind is ordered by hash."""
    held_out = {document.question for document in everything if document.held_out}
    learned = {d.question: d for d in everything if d.question and not d.held_out and d.question not in held_out}
    # Sorting by name would put the two tasks of a function next to each other.
    ordered = sorted(learned.values(), key=lambda document: stable_hash(document.question))
    for number, row in enumerate(one_of_each_kind(ordered, per_kind), start=1):
        for document in row:
            message = {"role": "user", "content": document.question}
            yield Prompt((message,), id=f"{document.kind}-{number:03}", category=document.kind)


def prompts_file(path: Path) -> OutputFile:
    """Return the ``OutputFile`` of the prompts, which never replaces a file that this script did not write."""
    held_out, learned = (is_json_lines_with(keys) for keys in (PROMPT_KEYS, PROMPT_KEYS[:3]))

    def is_ours(candidate: Path) -> bool:
        return held_out(candidate) or learned(candidate)

    return OutputFile(path, "a file of demo prompts", is_ours, PromptError)


QUESTIONS_PER_FORM = 60
QUESTIONS_PER_KIND = 400

CONCEPTS = """gravity; photosynthesis; inflation; supply and demand; machine learning; the water cycle; black holes;
plate tectonics; natural selection; the immune system; electric current; the greenhouse effect; blockchain; quantum
computing; the stock market; compound interest; the nervous system; antibiotics; vaccines; DNA; nuclear fusion; sound
waves; magnetism; evaporation; osmosis; tides; volcanoes; the ozone layer; recursion; hash tables; binary search;
databases; encryption; the internet; operating systems; compilers; neural networks; cloud computing; version control;
unit testing; democracy; the separation of powers; human rights; globalization; opportunity cost; monopoly; game theory;
cognitive bias; memory; sleep; stress; friction; momentum; entropy; the periodic table; acids and bases; chemical bonds;
cell division; ecosystems; food chains; biodiversity; renewable energy; solar panels; wind turbines; batteries; electric
cars; airplane flight; bridges; 3D printing; robotics; GPS; satellites; telescopes; the solar system; eclipses; comets;
seasons; rainbows; thunderstorms; hurricanes; earthquakes; glaciers; deserts; coral reefs; rainforests; migration of
birds; hibernation; pollination; fermentation; digestion; blood pressure; metabolism; vitamins; proteins; allergies;
meditation; time zones; the calendar; prime numbers; probability; the Pythagorean theorem; derivatives; matrices;
logarithms; statistics; sampling; correlation and causation; the scientific method; peer review; copyright; insurance;
mortgages; taxes; budgets; credit scores; pensions; marketing; branding; supply chains; negotiation; leadership"""

THINGS = """bicycles; coffee; tea; bread; cheese; chocolate; olive oil; rice; honey; apples; tomatoes; potatoes; cotton;
wool; paper; glass; steel; concrete; wood; plastic; rubber; gold; salt; sugar; soap; candles; mirrors; clocks; pencils;
books; newspapers; radio; television; telephones; cameras; computers; smartphones; headphones; printers; elevators;
trains; subways; ships; sailing; hot-air balloons; helicopters; umbrellas; shoes; hats; jeans; guitars; pianos; violins;
drums; chess; football; basketball; tennis; swimming; hiking; camping; gardening; fishing; photography; painting;
pottery; knitting; cooking; baking; yoga; dancing; theater; opera; museums; libraries; zoos; aquariums; dogs; cats;
horses; cows; bees; butterflies; owls; penguins; dolphins; whales; elephants; lions; wolves; bears; turtles; frogs"""

CITIES = """Paris; Rome; London; Berlin; Madrid; Lisbon; Vienna; Prague; Athens; Istanbul; Cairo; Nairobi; Cape Town;
Mumbai; Delhi; Bangkok; Singapore; Tokyo; Kyoto; Seoul; Beijing; Shanghai; Sydney; Melbourne; Auckland; Toronto;
Vancouver; Montreal; New York; Chicago; San Francisco; Boston; Mexico City; Havana; Lima; Buenos Aires; Rio de Janeiro;
Iceland; Norway; Sweden; Scotland; Ireland; Switzerland; Italy; Spain; Greece; Egypt; Morocco; Kenya; India; Nepal;
Thailand; Vietnam; Japan; China; Australia; New Zealand; Canada; Brazil; Argentina; Chile; Peru; Alaska; the Alps"""

PEOPLE = """Isaac Newton; Galileo Galilei; Charles Darwin; Leonardo da Vinci; Michelangelo; Johannes Gutenberg; Nikola
Tesla; Thomas Edison; Alan Turing; Ada Lovelace; Grace Hopper; Louis Pasteur; Alexander Fleming; Gregor Mendel; Niels
Bohr; Johannes Kepler; Nicolaus Copernicus; Archimedes; Aristotle; Plato; Socrates; Confucius; Julius Caesar; Cleopatra;
Alexander the Great; Napoleon Bonaparte; Queen Victoria; Abraham Lincoln; George Washington; Benjamin Franklin; Mahatma
Gandhi; Nelson Mandela; Marco Polo; Christopher Columbus; Ferdinand Magellan; Vasco da Gama; Amelia Earhart; the Wright
brothers; Ludwig van Beethoven; Wolfgang Amadeus Mozart; Johann Sebastian Bach; Vincent van Gogh; Claude Monet;
Rembrandt; Frida Kahlo; Jane Austen; Charles Dickens; Mark Twain; Leo Tolstoy; Homer; Dante; Miguel de Cervantes;
Florence Nightingale; Rosalind Franklin"""

EVENTS = """the French Revolution; the American Civil War; the First World War; the Second World War; the Industrial
Revolution; the Renaissance; the Cold War; the fall of the Berlin Wall; the first Moon landing; the sinking of the
Titanic; the Great Depression; the Black Death; the discovery of penicillin; the invention of the printing press; the
building of the Great Wall of China; the fall of the Roman Empire; the first Olympic Games; the opening of the Suez
Canal; the Russian Revolution; the signing of the Magna Carta"""

TASKS = """reverse a string; check whether a number is prime; compute the factorial of a number; find the largest
number in a list; sort a list of dictionaries by a key; count the words in a file; remove duplicates from a list;
merge two sorted lists; check whether a word is a palindrome; compute the average of a list; convert Celsius to
Fahrenheit; generate the Fibonacci numbers; flatten a nested list; find the common elements of two lists; read a CSV
file; write a JSON file; count the vowels in a sentence; find the second largest number; transpose a matrix; validate
an email address; group words by their first letter; compute the greatest common divisor; rotate a list; parse a date;
find all anagrams of a word; implement a stack; implement a queue; implement binary search; compute compound interest;
convert a number to binary; find the longest word in a text; shuffle a list; count how often each character occurs;
compute the distance between two points; list all files in a folder; download a web page; draw a bar chart; measure
how long a function takes; cache the results of a function; split a list into chunks"""

OCCASIONS = """a day off next Friday; a late delivery; a job interview; a broken washing machine; a meeting that must be
moved; a birthday party; a recommendation letter; a refund; a noisy neighbor; a team success; a new colleague; a
conference talk; an apartment for rent; a missed deadline; a change of address; a thank-you to a teacher; a school trip;
a charity run; a product launch; a salary raise"""

HEROES = """a lighthouse keeper; a robot that learns to paint; a lost puppy; a young inventor; two rival bakers; a time
traveler; a shy dragon; an old sailor; a girl who talks to trees; a detective in a small town; a cat that runs a
bookshop; an astronaut alone on Mars; a clockmaker; a village without rain; a singing river; a forgotten library; a boy
and his kite; a magician who lost her tricks; a friendly ghost; the last train of the night"""

ADVICE_TOPICS = """learn a new language; sleep better; save money; stay motivated; prepare for an exam; make new
friends; cook healthy meals; start running; write a good essay; manage time; work from home; reduce stress; grow
vegetables; choose a laptop; plan a wedding; train a dog; improve handwriting; read more books; give a speech; learn
to play the guitar; organize a kitchen; find a hobby; pack for a long trip; take better photos; remember names; build
a bookshelf; clean a carpet; repair a bicycle tire; start a small business; teach children to share"""

QUESTION_FORMS: tuple[tuple[str, str, str], ...] = (
    ("explain", CONCEPTS, "What is {}?"),
    ("explain", CONCEPTS, "Explain {} to a ten-year-old."),
    ("explain", CONCEPTS, "How does {} work? Answer in one paragraph."),
    ("explain", CONCEPTS, "Give three examples of {} in everyday life."),
    ("explain", CONCEPTS, "What are common misconceptions about {}?"),
    ("explain", CONCEPTS, "Why is {} important?"),
    ("list", THINGS, "List five interesting facts about {}."),
    ("list", THINGS, "What is the history of {}?"),
    ("list", THINGS, "What are the advantages and disadvantages of {}?"),
    ("list", THINGS, "How are {} made or done? Describe the steps."),
    ("write", THINGS, "Write a short poem about {}."),
    ("write", THINGS, "Write a product description for a shop that sells or teaches {}."),
    ("travel", CITIES, "Suggest a three-day itinerary for {}."),
    ("travel", CITIES, "What is {} known for?"),
    ("travel", CITIES, "Write a travel blog post about a recent trip to {}."),
    ("travel", CITIES, "What should I eat in {}?"),
    ("facts", PEOPLE, "Who was {}?"),
    ("facts", PEOPLE, "What did {} achieve? Answer in three sentences."),
    ("facts", PEOPLE, "Imagine you are {}. Introduce yourself and describe your work."),
    ("facts", EVENTS, "When did {} happen, and why does it matter?"),
    ("facts", EVENTS, "Summarize {} in a few sentences."),
    ("facts", EVENTS, "What were the causes and effects of {}?"),
    ("code", TASKS, "Write a Python program to {}."),
    ("code", TASKS, "How do I {} in JavaScript?"),
    ("code", TASKS, "Explain step by step how to {} in code, with an example."),
    ("write", OCCASIONS, "Write a polite email about {}."),
    ("write", OCCASIONS, "Draft a short announcement about {}."),
    ("write", HEROES, "Write a short story about {}."),
    ("write", HEROES, "Write the opening paragraph of a novel about {}."),
    ("advice", ADVICE_TOPICS, "How can I {}?"),
    ("advice", ADVICE_TOPICS, "Give me five tips to {}."),
    ("advice", ADVICE_TOPICS, "Write a dialogue between two friends about how to {}."),
)


def chat_questions(per_form: int = QUESTIONS_PER_FORM) -> Iterator[tuple[str, str]]:
    """Yield questions as ``(kind, text)``, up to ``per_form`` per question form, chosen by hash."""
    for kind, topics, form in QUESTION_FORMS:
        texts = {form.format(" ".join(topic.split())) for topic in topics.split(";")}
        yield from ((kind, text) for text in sorted(texts, key=stable_hash)[:per_form])


def document_questions(
    everything: Iterable[TrainingDocument], per_kind: int = QUESTIONS_PER_KIND
) -> Iterator[tuple[str, str]]:
    """Yield ``(kind, text)`` for up to ``per_kind`` questions of each kind, about documents that are not held out."""
    texts: dict[str, set[str]] = {kind: set() for kind in PROMPT_KINDS}
    for document in everything:
        if document.question and not document.held_out:
            texts[document.kind].add(document.question)
    for kind, kind_texts in texts.items():
        yield from ((kind, text) for text in sorted(kind_texts, key=stable_hash)[:per_kind])


def everyday_rows(everything: Iterable[TrainingDocument]) -> Iterator[dict[str, Any]]:
    """Yield distinct everyday questions and questions about documents, ordered by hash, as rows of a prompts file."""
    questions = {*chat_questions(), *document_questions(everything)}
    for number, (kind, text) in enumerate(sorted(questions, key=lambda pair: stable_hash(pair[1])), start=1):
        yield {"id": f"{kind}-{number:04}", "category": kind, "messages": [{"role": "user", "content": text}]}


def main() -> None:
    parser = demo_arguments(__doc__, "where the prompts go")
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--learned", type=int, help="so many questions of each kind that the model learned from")
    chosen.add_argument("--everyday", action="store_true", help="what people ask a chat model")
    options = parser.parse_args()
    out = prompts_file(options.out)
    out.check()
    everything = list(documents(options.gsm8k, options.docs))
    if options.everyday:
        rows = list(everyday_rows(everything))
    elif options.learned is not None:
        questions = learned_questions(everything, options.learned)
        rows = [{"id": q.id, "category": q.category, "messages": list(q.messages)} for q in questions]
    else:
        rows = list(prompts(everything))
    out.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    print(f"{len(rows)} prompts in {options.out}")


if __name__ == "__main__":
    main()
