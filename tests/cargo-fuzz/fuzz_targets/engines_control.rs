#![no_main]

ronde_cargo_fuzz::program!(engines_control);
