#![no_main]

ronde_cargo_fuzz::program!(lines_of_shared_memory);
