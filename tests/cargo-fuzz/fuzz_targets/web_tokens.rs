#![no_main]

ronde_cargo_fuzz::program!(web_tokens);
