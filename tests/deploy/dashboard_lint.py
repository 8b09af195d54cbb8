"""The rules of Grafana's dashboard-linter for dashboards on Prometheus, under its names, and the dashboards that break them.

All but target-promql-rule are here; check_dashboards.py gives the queries to promtool for that one.
"""
import copy
import re

SOURCE = "${datasource}"
# Grafana's names of units (valueFormats/categories.ts), of the kinds that a dashboard of a server may want.
UNITS = set("""none string short percent percentunit hex sci locale
    flops mflops gflops tflops pflops eflops
    bytes decbytes bits decbits kbytes mbytes gbytes tbytes
    pps binBps Bps binbps bps KiBs KBs MiBs MBs GiBs GBs
    hertz ns µs ms s m h d dtdurationms dtdurations dthms dtdhms
    cps ops reqps rps wps iops cpm opm rpm wpm
    celsius watt joule bool bool_yes_no bool_on_off""".split())
GRAPHS = ("stat", "timeseries", "gauge", "status-history", "table")


def selectors(expression):
    """[(metric, labels)] of a query: `meshfill_mfu{job=~"$job"}` is ("meshfill_mfu", 'job=~"$job"')."""
    return [(name, labels) for name, _, labels in re.findall(r"\b(meshfill[\w:]+|up|ALERTS)\b(\{([^}]*)\})?", expression)]


def ranges(expression):
    """[(function, metric, window)] of `function(metric{…}[window])`."""
    return re.findall(r"(\w+)\(([\w:]+)(?:\{[^}]*\})?\[([^\]]*)\]", expression)


def variables(dashboard):
    return {each["name"]: each for each in dashboard["templating"]["list"]}


def panels(dashboard):
    return [each for each in dashboard["panels"] if each["type"] != "row"]


def targets(dashboard):
    return [(f"panel {each['title']!r}: {target['expr']}", target) for each in panels(dashboard) for target in each.get("targets", [])]


def template_datasource_rule(dashboard):
    sources = [each for each in dashboard["templating"]["list"] if each["type"] == "datasource"]
    if [(each["name"], each["label"], each["query"]) for each in sources] != [("datasource", "Data source", "prometheus")]:
        yield "there is no variable `datasource`, labelled Data source"


def template_rule(name):
    def rule(dashboard):
        variable = variables(dashboard).get(name)
        if not variable:
            yield f"there is no variable `{name}`"
            return
        for key, wanted in (("type", "query"), ("label", name.title()), ("multi", True), ("allValue", ".+")):
            if variable.get(key) != wanted:
                yield f"variable {name}: {key} is {variable.get(key)!r}, not {wanted!r}"
        if variable["datasource"]["uid"] != SOURCE:
            yield f"variable {name} does not use the variable `datasource`"
    return rule


def template_label_promql_rule(dashboard):
    for name, variable in variables(dashboard).items():
        if variable["type"] == "query" and not re.fullmatch(r"label_values\(\w+(\{[^}]*\})?, \w+\)", variable["query"]):
            yield f"variable {name}: {variable['query']} is no label_values(SERIES, LABEL)"


def template_on_time_change_reload_rule(dashboard):
    for name, variable in variables(dashboard).items():
        if variable["type"] == "query" and variable["refresh"] != 2:
            yield f"variable {name} is not read anew when the time changes"


def panel_datasource_rule(dashboard):
    for panel in panels(dashboard):
        for each in [panel, *panel.get("targets", [])]:
            if each["datasource"] != {"type": "prometheus", "uid": SOURCE}:
                yield f"panel {panel['title']!r} does not use the variable `datasource`"


def panel_title_description_rule(dashboard):
    for panel in panels(dashboard):
        if not panel["title"] or not panel["description"]:
            yield f"panel {panel['title']!r} has no title or no description"


def panel_units_rule(dashboard):
    for panel in panels(dashboard):
        unit = panel["fieldConfig"]["defaults"].get("unit")
        if panel["type"] in GRAPHS and unit not in UNITS:
            yield f"panel {panel['title']!r}: Grafana has no unit {unit!r}"


def panel_no_targets_rule(dashboard):
    for panel in panels(dashboard):
        if not panel.get("targets"):
            yield f"panel {panel['title']!r} asks for nothing"


def target_rate_interval_rule(dashboard):
    for where, target in targets(dashboard):
        if any(function in ("rate", "irate") and window != "$__rate_interval" for function, _, window in ranges(target["expr"])):
            yield f"{where}: not $__rate_interval"


def target_label_rule(label):
    def rule(dashboard):
        for where, target in targets(dashboard):
            if any(f'{label}=~"${label}"' not in labels for _, labels in selectors(target["expr"])):
                yield f"{where}: not of the chosen {label}"
    return rule


def target_counter_agg_rule(dashboard):
    for where, target in targets(dashboard):
        counted = {metric for function, metric, _ in ranges(target["expr"]) if function in ("rate", "irate", "increase")}
        for metric, _ in selectors(target["expr"]):
            if metric.endswith("_total") and metric not in counted:
                yield f"{where}: a counter without rate or increase"


def uneditable_dashboard(dashboard):
    if dashboard["editable"]:
        yield "it is editable"


def window_rule(dashboard):
    """Ours: a prefill takes minutes, so that no rate is taken over less than five."""
    for where, target in targets(dashboard):
        if any(window != "$window" for _, _, window in ranges(target["expr"])):
            yield f"{where}: not over $window"
    for choice in variables(dashboard).get("window", {"options": [{"value": "0m"}]})["options"]:
        number, unit = re.fullmatch(r"(\d+)([mh])", choice["value"]).groups()
        if int(number) * {"m": 1, "h": 60}[unit] < 5:
            yield f"variable window: {choice['value']} is shorter than a prefill"


RULES = {
    "template-datasource-rule": template_datasource_rule,
    "template-job-rule": template_rule("job"),
    "template-instance-rule": template_rule("instance"),
    "template-label-promql-rule": template_label_promql_rule,
    "template-on-time-change-reload-rule": template_on_time_change_reload_rule,
    "panel-datasource-rule": panel_datasource_rule,
    "panel-title-description-rule": panel_title_description_rule,
    "panel-units-rule": panel_units_rule,
    "panel-no-targets-rule": panel_no_targets_rule,
    "target-rate-interval-rule": target_rate_interval_rule,
    "target-job-rule": target_label_rule("job"),
    "target-instance-rule": target_label_rule("instance"),
    "target-counter-agg-rule": target_counter_agg_rule,
    "uneditable-dashboard": uneditable_dashboard,
    "window-rule": window_rule,
}


def exclusions(path):
    """The rules that a .lint file excludes, each with a reason."""
    return set(re.findall(r"^  ([\w-]+):\n    reason: \S", path.read_text(), re.M))


def lint(dashboard, excluded=frozenset()):
    return [f"{name}: {found}" for name, rule in RULES.items() if name not in excluded for found in rule(dashboard)]


def planted(dashboard):
    """(the rule that must find it, a dashboard with one mistake)."""
    def change(rule, edit):
        broken = copy.deepcopy(dashboard)
        edit(broken)
        return rule, broken

    def replace(rule, old, new):
        def edit(broken):
            target = next(each for _, each in targets(broken) if old in each["expr"])
            target["expr"] = target["expr"].replace(old, new)
        return change(rule, edit)

    yield change("template-datasource-rule", lambda d: variables(d)["datasource"].update(name="source"))
    yield change("template-job-rule", lambda d: variables(d)["job"].update(name="pool"))
    yield change("template-job-rule", lambda d: variables(d)["job"].update(allValue=".*"))
    yield change("template-instance-rule", lambda d: variables(d)["instance"].update(multi=False))
    yield change("template-instance-rule", lambda d: d["templating"]["list"].remove(variables(d)["instance"]))
    yield change("template-label-promql-rule", lambda d: variables(d)["rank"].update(query="label_values(rank"))
    yield change("template-on-time-change-reload-rule", lambda d: variables(d)["job"].update(refresh=1))
    yield change("panel-datasource-rule", lambda d: panels(d)[3].update(datasource={"type": "prometheus", "uid": "abc"}))
    yield change("panel-datasource-rule", lambda d: panels(d)[3]["targets"][0]["datasource"].update(uid="abc"))
    yield change("panel-title-description-rule", lambda d: panels(d)[7].update(description=""))
    yield change("panel-units-rule", lambda d: panels(d)[0]["fieldConfig"]["defaults"].update(unit="FLOP/s"))
    yield change("panel-units-rule", lambda d: panels(d)[-5]["fieldConfig"]["defaults"].pop("unit"))
    yield change("panel-no-targets-rule", lambda d: panels(d)[2].update(targets=[]))
    yield "target-rate-interval-rule", dashboard  # as it is, which is why .lint excludes this rule
    yield replace("target-job-rule", 'job=~"$job"', 'job="meshfill"')
    yield replace("target-instance-rule", ',instance=~"$instance"', "")
    yield change("target-counter-agg-rule", lambda d: panels(d)[1]["targets"][0].update(expr="sum(meshfill_requests_total)"))
    yield change("uneditable-dashboard", lambda d: d.update(editable=True))
    yield replace("window-rule", "[$window]", "[$__rate_interval]")
    yield change("window-rule", lambda d: variables(d)["window"]["options"][0].update(value="1m"))


def missed(dashboard):
    """The planted mistakes that their rule does not find."""
    return [rule for rule, broken in planted(dashboard) if not list(RULES[rule](broken))]
