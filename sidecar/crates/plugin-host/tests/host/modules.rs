//! Modules for tests, as WebAssembly text. Tests of running sidecars use them as well.

use std::collections::BTreeMap;

/// A module whose parts a test may replace.
#[derive(Clone)]
pub(crate) struct Wat {
    pub(crate) imports: String,
    pub(crate) memory: String,
    pub(crate) table: [u32; 16],
    pub(crate) manifests: Vec<String>,
    /// The bodies of exported functions, without parameters and with one `i32` as result unless they declare others.
    pub(crate) functions: BTreeMap<&'static str, String>,
    pub(crate) more: String,
}

/// The manifest of [`Wat::codec`].
pub(crate) const CODEC: &str = r#"{"abi": 1, "name": "test-codec", "version": "0.1.0", "about": "values as they are",
 "kinds": {"codec": {"dtypes": ["float32", "int64"], "state_bytes": 4, "lossless": true, "elementwise": false}},
 "parameters": [{"name": "ratio", "type": "float", "default": 0.5, "min": 0.0, "max": 1.0},
                {"name": "seed", "type": "int", "default": 7, "min": 0, "max": 4294967295},
                {"name": "mode", "type": "choice", "choices": ["a", "b"], "default": "b"},
                {"name": "flag", "type": "bool", "default": false}],
 "limits": {"memory_bytes": 131072, "call_ms": 10, "ranks": 4}}"#;

/// The manifest of [`Wat::reducer`], with a shape and measures filled in.
pub(crate) fn reducer_manifest(shape: &str, measures: u32) -> String {
    format!(
        r#"{{"abi": 1, "name": "test-reducer", "version": "0.1.0",
 "kinds": {{"reducer": {{"dtypes": ["float32", "uint8"], "shape": "{shape}", "commutative": true, "measures": {measures}}}}},
 "limits": {{"memory_bytes": 131072, "call_ms": 10, "ranks": 4}}}}"#
    )
}

/// The buffers of the modules.
pub(crate) const TABLE: [u32; 16] = [
    1, 64, 128, 64, // ABI version, call, parameters
    0x2000, 0x2000, 0x4000, 0x2000, // input, output: 8 KiB each
    0x6000, 0x2000, 0x1000, 0x1000, // state: 8 KiB, measures: 4 KiB
    0, 0, 0, 0,
];

impl Wat {
    /// A codec of `float32` and `int64` that changes nothing, and counts in the state of each span's first element.
    pub(crate) fn codec() -> Self {
        let mut module = Self::plain(CODEC.to_owned());
        module.functions.insert("ronde_bound", "(param i32) (i32.mul (local.get 0) (i32.const 8))".to_owned());
        module.functions.insert(
            "ronde_encode",
            "(i32.store (i32.const 0x6000) (i32.add (i32.load (i32.const 0x6000)) (i32.const 1)))
             (memory.copy (i32.const 0x4000) (i32.const 0x2000) (call $bytes))
             (call $bytes)"
                .to_owned(),
        );
        module.functions.insert(
            "ronde_decode",
            "(memory.copy (i32.const 0x4000) (i32.const 0x2000) (i32.load (i32.const 112))) (i32.const 0)".to_owned(),
        );
        module
    }

    /// A reducer whose result is its last operand.
    pub(crate) fn reducer(shape: &str, measures: u32) -> Self {
        let mut module = Self::plain(reducer_manifest(shape, measures));
        module.functions.insert(
            "ronde_reduce",
            "(memory.copy (i32.const 0x4000)
               (i32.add (i32.const 0x2000)
                 (i32.mul (i32.load (i32.const 120)) (i32.sub (i32.load (i32.const 116)) (i32.const 1))))
               (call $bytes))
             (i32.const 0)"
                .to_owned(),
        );
        module
    }

    fn plain(manifest: String) -> Self {
        let functions =
            [("ronde_abi", "(i32.const 1)"), ("ronde_place", "(i32.const 0)"), ("ronde_configure", "(i32.const 0)")];
        Self {
            imports: String::new(),
            memory: "(memory (export \"memory\") 2)".to_owned(),
            table: TABLE,
            manifests: vec![manifest],
            functions: functions.map(|(name, body)| (name, body.to_owned())).into(),
            more: String::new(),
        }
    }

    /// Replaces the body of a function.
    pub(crate) fn with(mut self, name: &'static str, body: &str) -> Self {
        self.functions.insert(name, body.to_owned());
        self
    }

    /// Adds text to the module.
    pub(crate) fn and(mut self, more: &str) -> Self {
        self.more.push_str(more);
        self
    }

    /// Replaces a word of the table.
    pub(crate) fn placed(mut self, word: usize, value: u32) -> Self {
        self.table[word] = value;
        self
    }

    /// Renames the plugin.
    #[allow(dead_code, reason = "sidecars know plugins by name, and hosts do not")]
    pub(crate) fn named(mut self, name: &str) -> Self {
        for manifest in &mut self.manifests {
            *manifest = manifest.replace("test-codec", name).replace("test-reducer", name);
        }
        self
    }

    /// The module in binary form.
    pub(crate) fn wasm(&self) -> Vec<u8> {
        let text = self.text();
        wat::parse_str(&text).unwrap_or_else(|error| panic!("{error}\n{text}"))
    }

    /// The module in text form.
    pub(crate) fn text(&self) -> String {
        let bytes: String =
            self.table.iter().flat_map(|word| word.to_le_bytes()).map(|byte| format!("\\{byte:02x}")).collect();
        let sections: String = self.manifests.iter().map(|manifest| section(manifest)).collect();
        let functions: String = self.functions.iter().map(|(name, body)| function(name, body)).collect();
        format!(
            "(module {sections} {} {} (data (i32.const 0) \"{bytes}\") {functions} {}
              ;; Bytes of the span: of 8, 4 or 1 each.
              (func $bytes (result i32)
                (i32.mul (i32.load (i32.const 76))
                  (select (i32.const 8) (select (i32.const 4) (i32.const 1) (i32.eq (i32.load (i32.const 68)) (i32.const 8)))
                    (i32.eq (i32.load (i32.const 68)) (i32.const 5))))))",
            self.imports, self.memory, self.more
        )
    }
}

fn section(manifest: &str) -> String {
    format!(
        "(@custom \"ronde.manifest\" \"{}\")\n",
        manifest.replace('\\', "\\5c").replace('"', "\\22").replace('\n', " ")
    )
}

/// A body may start with parameters and a result type. A body of `none` is not exported.
fn function(name: &str, body: &str) -> String {
    if body == "none" {
        return String::new();
    }
    let (parameters, body) = match body.strip_prefix("(param i32)") {
        Some(rest) => ("(param i32)", rest),
        None => ("", body),
    };
    let result = if body.starts_with("(result") { "" } else { "(result i32)" };
    format!("(func (export \"{name}\") {parameters} {result} {body})\n")
}
