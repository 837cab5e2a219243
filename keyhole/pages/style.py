"""The look of every page: colours of the methods, and its style sheet, for light and dark, screens and phones."""

COLOURS = "#3b6fe0 #e0702f #14957d #b0479f #c0941a #cc3f55 #3fa5cf #73821f #7f60d0 #5b6472 #a8633a #2f9e44".split()
STYLE = """
:root{--ink:#182031;--soft:#5c677b;--line:#e2e7ef;--card:#fff;--page:#f3f6fa;--glow:#3b6fe0;color-scheme:light dark}
@media (prefers-color-scheme:dark){
:root{--ink:#e8ecf4;--soft:#9aa6ba;--line:#2a3343;--card:#161d29;--page:#0e131b;--glow:#7aa2ff}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);
font:15px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
main{max-width:1240px;margin:0 auto;padding:44px 22px 64px}
.eyebrow{margin:0;color:var(--glow);font-size:13px;font-weight:600;letter-spacing:.06em;text-transform:uppercase}
h1{font-size:clamp(24px,4vw,36px);line-height:1.15;margin:4px 0 10px;letter-spacing:-.02em;overflow-wrap:anywhere}
h2{font-size:22px;margin:42px 0 12px;overflow-wrap:anywhere}h3{font-size:18px;margin:34px 0 10px;overflow-wrap:anywhere}
.lead{font-size:17px;max-width:80ch;margin:0 0 14px;color:var(--soft)}.lead b{color:var(--ink)}
a{color:var(--glow)}p,ul{max-width:86ch}p,li{overflow-wrap:anywhere}
.chips{display:flex;flex-wrap:wrap;gap:8px;list-style:none;padding:0;margin:0 0 18px}
.chips li{background:var(--card);border:1px solid var(--line);border-radius:15px;padding:3px 12px;font-size:13px;
color:var(--soft)}
.note{color:var(--soft);font-size:13px}
.scroll{overflow-x:auto;border:1px solid var(--line);border-radius:12px;background:var(--card)}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{padding:10px 14px;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap;vertical-align:top}
tbody tr:last-child>*{border-bottom:0}thead th{font-size:13px;font-weight:600;color:var(--soft)}
thead small,td small{display:block;font-weight:400;font-size:11px}
th:first-child,.left{text-align:left}tbody th{font-weight:600}
.long{white-space:normal;overflow-wrap:anywhere;min-width:12ch;max-width:30ch}
th:first-child{position:sticky;left:0;background:var(--card);min-width:15ch;max-width:min(46vw,40ch);
overflow-wrap:anywhere;white-space:normal}
td b{font-size:16px;font-weight:600}td i{font-style:normal;color:var(--soft);font-size:12px;margin-left:5px}
.best b{color:var(--glow)}.best .bar span{background:var(--glow)}
.mean{font-weight:600}.none{color:var(--soft)}.untrained th,.untrained td{color:var(--soft)}
.warn{display:inline-block;width:16px;height:16px;line-height:16px;border-radius:50%;text-align:center;font-size:11px;
font-weight:700;background:#cc3f55;color:#fff;margin-left:6px}
.bar{display:block;height:4px;border-radius:2px;background:var(--line);margin:6px 0 0 auto;width:100%;
min-width:76px;max-width:150px}
.bar span{display:block;height:100%;border-radius:2px;background:var(--soft)}
.dot{display:inline-block;width:10px;height:10px;border-radius:50%;margin-right:9px;background:var(--line)}
.small th,.small td{padding:6px 12px;font-size:13px}
.small .left{white-space:normal;overflow-wrap:anywhere;min-width:18ch}
.chosen td,.chosen th{font-weight:700}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,380px),1fr));gap:16px}
figure{margin:0;background:var(--card);border:1px solid var(--line);border-radius:12px;padding:14px 8px 8px}
svg{display:block;width:100%;height:auto}polyline{fill:none;stroke-linejoin:round}.line{stroke-width:2.4}
.raw{stroke-width:1;opacity:.25}figcaption{padding:4px 10px 6px;color:var(--soft);font-size:13px}
.choice{display:flex;flex-wrap:wrap;gap:6px}.panel{display:none;width:100%;min-width:0;margin-top:8px}
.pick{position:absolute;opacity:0;width:1px;height:1px}
.pick+label{cursor:pointer;border:1px solid var(--line);border-radius:99px;padding:3px 14px;font-size:13px;
color:var(--soft);background:var(--card)}
.pick:checked+label{color:var(--card);background:var(--glow);border-color:var(--glow)}
.pick:focus-visible+label{outline:2px solid var(--ink)}
.p0:checked~.q0,.p1:checked~.q1,.p2:checked~.q2{display:block}
.band{opacity:.14}.grid{stroke:var(--line)}.base{stroke:var(--soft);stroke-dasharray:4 4}
.tick,.axis{fill:var(--soft);font-size:14px}.name{font-size:15px;font-weight:600}
.over{paint-order:stroke;stroke:var(--card);stroke-width:4px}
details{margin:14px 0}summary{cursor:pointer;font-weight:600;padding:6px 0}
pre{background:var(--card);border:1px solid var(--line);border-radius:12px;padding:13px 16px;overflow-x:auto;
font-size:13px}
@media (max-width:560px){
main{padding:26px 14px 40px}th,td{padding:8px 10px}}
"""
