// Runs the worker in WebAssembly as a rank of the job that the environment names: node worker.cjs MODULE
const fs = require("fs");
const { work } = require(process.argv[2]);

const { RONDE_WEB, RONDE_JOB, RONDE_RANK, RONDE_TOKEN_FILE } = process.env;
work(RONDE_WEB, RONDE_JOB, Number(RONDE_RANK), fs.readFileSync(RONDE_TOKEN_FILE), process.pid).then(
  (lines) => console.log(lines),
  (error) => {
    console.error(String(error));
    process.exitCode = 1;
  },
);
