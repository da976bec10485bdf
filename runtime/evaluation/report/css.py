"""The style sheet of the page: one column on a telephone, two on a desk, light and dark."""

SHEET = """\
*{box-sizing:border-box}
body{margin:0 auto;max-width:76rem;padding:1.25rem;background:var(--paper);color:var(--ink);
  font:1rem/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans",sans-serif;overflow-wrap:break-word}
h1{font-size:1.7rem;line-height:1.2;margin:.5rem 0}
h2{font-size:1.25rem;margin:2.2rem 0 .6rem;padding-top:.8rem;border-top:1px solid var(--faint)}
h3{font-size:1rem;margin:0 0 .5rem}
.lead{font-size:1.1rem;max-width:46rem}
pre,code{font:.85rem/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,"Liberation Mono",monospace}
pre{padding:.7rem .9rem;border:1px solid var(--faint);border-radius:.4rem;white-space:pre-wrap;overflow-wrap:anywhere}
.wide{overflow-x:auto;margin:1rem 0 .4rem}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:.92rem}
caption{text-align:left;font-weight:600;padding-bottom:.3rem;white-space:nowrap}
th,td{padding:.28rem .8rem .28rem 0;text-align:right;white-space:nowrap;border-bottom:1px solid var(--faint)}
th{font-weight:600;vertical-align:bottom}
th:first-child,td:first-child{text-align:left}
.findings{list-style:none;margin:0;padding:0;display:grid;gap:1rem}
.findings p{margin:.2rem 0 0}
.findings b{margin-left:.4rem}
.yes{color:var(--context)}
.no{color:var(--corpus)}
.open,.note,figcaption{opacity:.8}
.note{margin:.2rem 0 1rem;font-size:.9rem}
.figures{columns:26rem;column-gap:2.5rem}
figure{margin:0 0 2.2rem;break-inside:avoid}
img{display:block;width:100%;height:auto}
figcaption{font-size:.9rem;margin-top:.5rem}
details{margin-top:.4rem;font-size:.92rem}
summary{cursor:pointer}
.legend span{display:inline-block;margin:0 .5rem .3rem 0;padding:.1rem .5rem;border-radius:.3rem}
.legend span,.answer span{color:var(--own);background:color-mix(in srgb,var(--own) 13%,transparent)}
.answer .none,.legend .none{color:var(--ink);background:none}
.legend .none{border:1px solid var(--faint)}
.asked{max-width:52rem;margin:1rem 0;padding-left:.9rem;border-left:3px solid var(--faint);
  white-space:pre-wrap;overflow-wrap:anywhere}
.answer{white-space:pre-wrap;line-height:1.75;max-width:52rem;overflow-wrap:anywhere}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.25rem 1.2rem;margin:0}
dt{font-weight:600}
dd{margin:0;overflow-wrap:anywhere}
@media (max-width:40rem){body{padding:.9rem}dl{grid-template-columns:1fr}dd{margin-bottom:.5rem}}
"""
