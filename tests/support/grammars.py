"""Grammars that are large or recursive, as applications use them."""

from __future__ import annotations

from hdtool.data.prompts import Grammar
from tests.support.json_schemas import YES, Schema, number, one_of, record, several, text

ANY_TEXT: Schema = {"type": "string"}
LEAF = record(value=ANY_TEXT)
DEEP, OPTIONAL = LEAF, record(("a", "b", "c"), a=ANY_TEXT, b=ANY_TEXT, c=number())
for _ in range(6):
    DEEP = record(before=ANY_TEXT, inner=DEEP, after=number())
    OPTIONAL = record(("a", "inner", "c"), a=ANY_TEXT, inner=OPTIONAL, c=number())
NAMES = tuple(f"option_{index}" for index in range(100))
CALLS = [
    record(name={"const": f"tool_{index}"}, arguments=record(("limit",), query=ANY_TEXT, limit=number(), exact=YES))
    for index in range(20)
]
TREE: Schema = {
    "$defs": {
        "node": record(
            ("children",),
            value={"anyOf": [ANY_TEXT, number(), {"$ref": "#/$defs/node"}]},
            children={"type": "array", "items": {"$ref": "#/$defs/node"}},
        )
    },
    "$ref": "#/$defs/node",
}
JSON = r"""
start: value
value: object | array | STRING | NUMBER | "true" | "false" | "null"
object: "{" [pair ("," pair)*] "}"
pair: STRING ":" value
array: "[" [value ("," value)*] "]"
STRING: /"([^"\\\x00-\x1f]|\\["\\\/bfnrt]|\\u[0-9a-fA-F]{4})*"/
NUMBER: /-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/
%ignore /[ \t\n\r]+/
"""
SQL = r"""
start: query ";"
query: select (("UNION" | "EXCEPT") select)*
select: "SELECT" ["DISTINCT"] items "FROM" tables ["WHERE" either] ["GROUP BY" sums] ["ORDER BY" sums] ["LIMIT" INT]
items: "*" | item ("," item)*
item: sum ["AS" NAME]
tables: table (("JOIN" | "LEFT JOIN" | ",") table ["ON" either])*
table: NAME ["AS" NAME] | "(" query ")" "AS" NAME
sums: sum ("," sum)*
either: both ("OR" both)*
both: test ("AND" test)*
test: ["NOT"] (sum ("=" | "<>" | "<" | ">") sum | sum "IN" "(" (query | sums) ")" | sum "LIKE" STRING | "(" either ")")
sum: product (("+" | "-") product)*
product: atom (("*" | "/") atom)*
atom: NAME ["." NAME] | INT | STRING | NAME "(" ["*" | sums] ")" | "(" sum ")" | "(" query ")"
NAME: /[a-z_][a-z0-9_]*/
INT: /[0-9]+/
STRING: /'[^']*'/
%ignore /[ \t\n]+/
"""
SUMS = 'start: s\ns: s "+" s | s "*" s | "(" s ")" | N\nN: /[0-9]+/'
CHESS = r"""
root ::= "1. " move " " move "\n" ([1-9] [0-9]? ". " move " " move "\n")+
move ::= (pawn | piece | castle) [+#]?
piece ::= [NBKQR] [a-h]? [1-8]? "x"? [a-h] [1-8]
pawn ::= ([a-h] "x")? [a-h] [1-8] ("=" [NBKQR])?
castle ::= "O-O" "-O"?
"""
LINK = r"(https?://[a-z0-9.-]+(/[\w.-]*)*(\?[a-z]+=[^&\s]*(&[a-z]+=[^&\s]*)*)? ){1,30}"
DATES = (
    r"((0[1-9]|[12][0-9]|3[01])/(0[1-9]|1[0-2])/[12][0-9]{3}: ([A-Z][a-z]{1,20} ){1,6}(yes|no|-?[0-9]{1,9}); ){5,40}"
)
LARGE_GRAMMARS = {
    "nested objects": Grammar.json_schema(DEEP),
    "nested optional fields": Grammar.json_schema(OPTIONAL),
    "100 optional fields": Grammar.json_schema(record(NAMES, **dict.fromkeys(NAMES, ANY_TEXT))),
    "arrays of objects": Grammar.json_schema({"type": "array", "items": record(a=ANY_TEXT, b=several(LEAF))}),
    "200 values": Grammar.json_schema(several(one_of(*(f"value {index}" for index in range(200))), 1, 50)),
    "20 objects": Grammar.json_schema({"oneOf": CALLS}),
    "calls of 20 tools": Grammar.json_schema({"type": "array", "items": {"anyOf": CALLS}, "minItems": 1}),
    "tree": Grammar.json_schema(TREE),
    "long text": Grammar.json_schema(record(a=text(4000), b=several(number(), 20, 500))),
    "any object": Grammar.json_schema({"type": "object"}),
    "links": Grammar.regex(LINK),
    "dates": Grammar.regex(DATES),
    "JSON": Grammar.of(JSON),
    "SQL": Grammar.of(SQL),
    "ambiguous sums": Grammar.of(SUMS),
    "chess": Grammar.of(CHESS),
}
