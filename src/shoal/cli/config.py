"""`shoal config show` and `shoal config schema`."""

import typer

from shoal.cli.common import AsJson, File, Overrides, print_json

config_app = typer.Typer(help="Inspect a config before using it.", no_args_is_help=True, rich_markup_mode=None)


@config_app.command("show")
def config_show(file: File, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Print the resolved config: every key, with defaults, includes and overrides applied."""
    from shoal import api

    config = api.load_config(file, overrides or [])
    if as_json:
        print_json(api.config_values(config))
    else:
        typer.echo(api.config_to_yaml(config), nl=False)


@config_app.command("schema")
def config_schema(as_json: AsJson = False) -> None:
    """Print the JSON Schema of the config, for editors and other programs. It is JSON with or without --json."""
    from shoal import api

    print_json(api.json_schema())
