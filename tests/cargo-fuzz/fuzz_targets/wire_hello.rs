#![no_main]

ronde_cargo_fuzz::program!(wire_hello);
