"""The one page a browser sees at the gateway's root."""

import json
from html import escape
from string import Template

_PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>mooncake_zmq gateway</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 46rem; margin: 3rem auto; padding: 0 1rem; }
pre { background: #8881; padding: 1rem; overflow-x: auto; }
</style>
</head>
<body>
<h1>mooncake_zmq</h1>
<p>An OpenAI-compatible endpoint at <code>$base/v1</code> serves the model <code>$model</code>,
up to $max_model_len tokens of prompt and output together.</p>
<pre>$curl</pre>
<p><a href="/v1/models">models</a> · <a href="/health">health</a> · <a href="/metrics">metrics</a> ·
<a href="/docs">manual</a></p>
</body>
</html>
""")


def front_page(base_url: str, model: str, max_model_len: int) -> str:
    """Endpoint, model and a line to try it with."""
    base = base_url.rstrip("/")
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello!"}], "stream": True})
    curl = f"curl -N {base}/v1/chat/completions -H 'content-type: application/json' -d '{body}'"
    return _PAGE.substitute(base=escape(base), model=escape(model), max_model_len=max_model_len, curl=escape(curl))
