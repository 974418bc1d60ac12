#![no_main]

ronde_cargo_fuzz::program!(codecs_of_plugins);
