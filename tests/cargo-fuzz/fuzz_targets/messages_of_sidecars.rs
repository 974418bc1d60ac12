#![no_main]

ronde_cargo_fuzz::program!(messages_of_sidecars);
