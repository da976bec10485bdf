"""Thirty JSON schemas like those that applications use with language models."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def text(max_length: int = 24) -> Schema:
    return {"type": "string", "maxLength": max_length}


def one_of(*values: Any) -> Schema:
    return {"enum": list(values)}


def number(minimum: float | None = None, maximum: float | None = None, kind: str = "integer") -> Schema:
    bounds = {"minimum": minimum, "maximum": maximum}
    return {"type": kind, **{name: value for name, value in bounds.items() if value is not None}}


def several(items: Schema, min_items: int = 0, max_items: int = 3) -> Schema:
    return {"type": "array", "items": items, "minItems": min_items, "maxItems": max_items}


def record(optional: tuple[str, ...] = (), **properties: Schema) -> Schema:
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


YES = {"type": "boolean"}
MONEY = record(amount=number(0, 99999), currency=one_of("EUR", "USD", "JPY", "GBP"))
ADDRESS = record(("unit",), street=text(), unit=text(6), city=text(16), postal_code=text(8), country=text(16))
DAY = {"type": "string", "format": "date"}

JSON_SCHEMAS: dict[str, Schema] = {
    "sentiment": record(sentiment=one_of("positive", "neutral", "negative"), confidence=number(0, 100)),
    "classification": record(label=one_of("bug", "feature request", "question", "spam"), reason=text(40)),
    "yes or no": record(answer=YES, explanation=text(40)),
    "person": record(("email",), first_name=text(), last_name=text(), age=number(0, 130), email=text(30)),
    "address": ADDRESS,
    "nested customer": record(customer=record(name=text(), address=ADDRESS), since=DAY, active=YES),
    "invoice": record(
        invoice_number=text(12),
        issue_date=DAY,
        line_items=several(record(description=text(), quantity=number(1, 99), unit_price=MONEY), 1),
        total=MONEY,
    ),
    "event": record(title=text(30), start_date=DAY, end_date=DAY, participants=several(text(16), 1)),
    "tool call": record(
        name=one_of("get_weather"), arguments=record(location=text(), unit=one_of("celsius", "kelvin"))
    ),
    "tool choice": {
        "anyOf": [
            record(name={"const": "search_documents"}, arguments=record(query=text(30), max_results=number(1, 10))),
            record(name={"const": "send_message"}, arguments=record(recipient=text(16), body=text(40))),
        ]
    },
    "entities": record(
        entities=several(record(text=text(), type=one_of("PERSON", "ORGANIZATION", "LOCATION", "DATE")), 1)
    ),
    "knowledge graph": record(triples=several(record(subject=text(16), predicate=text(16), object=text(16)), 1)),
    "steps of a proof": record(steps=several(record(explanation=text(40), output=text(20)), 1), final_answer=text(20)),
    "recipe": record(
        title=text(30),
        servings=number(1, 12),
        ingredients=several(record(name=text(16), quantity=number(1, 1000), unit=one_of("g", "ml", "piece")), 1),
        instructions=several(text(40), 1),
    ),
    "product": record(
        ("discount_percent",),
        product_id=number(1),
        name=text(),
        in_stock=YES,
        price=MONEY,
        discount_percent=number(1, 90),
    ),
    "review": record(rating=number(1, 5), pros=several(text(20), 1), cons=several(text(20)), recommended=YES),
    "weather": record(
        location=text(16), temperature_celsius=number(-60, 60), conditions=one_of("clear", "rain", "snow", "fog")
    ),
    "coordinates": record(latitude=number(-90, 90, "number"), longitude=number(-180, 180, "number")),
    "matrix": record(matrix=several(several(number(0, 9), 2, 2), 2, 2)),
    "translation": record(source_language=one_of("English", "Deutsch", "Français", "日本語"), translated_text=text(40)),
    "unicode keys": record(名前=text(16), âge=number(0, 130), größe_in_cm=number(30, 250)),
    "emoji": record(reaction=one_of("👍", "👎", "🎉", "🤔"), comment=text(30)),
    "configuration": record(
        server=record(host=text(20), port=number(1, 65535), tls_enabled=YES),
        logging=record(level=one_of("debug", "info", "warning", "error"), file={"anyOf": [text(20), {"type": "null"}]}),
    ),
    "database query": record(
        table=one_of("users", "orders", "payments"),
        columns=several(one_of("id", "created_at", "status"), 1),
        conditions=several(record(column=text(12), operator=one_of("=", "<", ">"), value=text(12)), 0, 2),
        limit=number(1, 100),
    ),
    "user interface": {
        "$defs": {
            "component": record(
                ("children",),
                type=one_of("div", "button", "label"),
                label=text(16),
                children={"type": "array", "items": {"$ref": "#/$defs/component"}, "maxItems": 1},
            )
        },
        "$ref": "#/$defs/component",
    },
    "git commit": record(
        type=one_of("feat", "fix", "docs", "refactor"),
        breaking_change=YES,
        summary=text(50),
        files=several(text(20), 1),
    ),
    "moderation": record(
        flagged=YES, categories=record(hate=YES, violence=YES, self_harm=YES, sexual=YES, harassment=YES)
    ),
    "medical": record(
        patient_id={"type": "string", "pattern": "^P[0-9]{4}$"}, symptoms=several(text(20), 1), urgent=YES
    ),
    "flight": record(
        departure_airport={"type": "string", "pattern": "^[A-Z]{3}$"},
        arrival_airport={"type": "string", "pattern": "^[A-Z]{3}$"},
        departure_time={"type": "string", "format": "date-time"},
        passengers=several(record(name=text(16), seat_class=one_of("economy", "business")), 1),
    ),
    "quiz": record(
        question=text(50),
        choices=several(text(16), 4, 4),
        correct_choice=number(0, 3),
        difficulty=one_of("easy", "hard"),
    ),
}
